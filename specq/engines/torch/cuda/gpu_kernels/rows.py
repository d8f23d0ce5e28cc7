"""Triton kernels for operations row by row: embedding, norms, rotation, activation.

x f32[rows, hidden] is the residual stream. Each program has one row, or a part of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed_kernel(
    token_ids_ptr, embedding_ptr, norm_ptr, x_ptr, xw_ptr, squares_ptr,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Set x = the token's embedding and xw = x * norm.

    The first partial sum of squares is the whole sum, the others are 0.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, rows = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, HIDDEN_PAD)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    x = tl.load(embedding_ptr + token * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * HIDDEN + n, x, mask=n < HIDDEN)
    tl.store(xw_ptr + row * HIDDEN + n, (x * norm).to(xw_ptr.dtype.element_ty), mask=n < HIDDEN)
    part = tl.arange(0, PARTS_PAD)
    tl.store(squares_ptr + part * rows + row, tl.where(part == 0, tl.sum(x * x, 0), 0.0), mask=part < PARTS)


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, norm_ptr, out_ptr, rows_ptr, eps,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, ADD: tl.constexpr, PICK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set out [programs, HIDDEN] = RMSNorm(x); with ADD, x += delta first.

    With PICK, program i takes row rows[i] of x.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    to = tl.program_id(0)
    row = tl.load(rows_ptr + to) if PICK else to
    n = tl.arange(0, HIDDEN_PAD)
    x = tl.load(x_ptr + row * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + row * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * HIDDEN + n, x, mask=n < HIDDEN)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    norm = tl.load(norm_ptr + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + to * HIDDEN + n, (x * scale * norm).to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rotate_kernel(
    qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr,
    kv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SHARE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply bias, head norm and rotation to qkv [rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]. Program (row, SHARE heads).

    Queries go to q, keys and values to their slots. A slot of -1 is not written.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0)
    head = tl.program_id(1) * SHARE + tl.arange(0, SHARE)[:, None]
    i = tl.arange(0, HALF)[None, :]
    n = head * HEAD_DIM + i
    if PDL:
        gdc_launch_dependents()
    angle = tl.load(positions_ptr + row) * HALF + i
    is_rotated = head < HEADS + KV_HEADS
    cos = tl.where(is_rotated, tl.load(cos_ptr + angle), 1.0)
    sin = tl.where(is_rotated, tl.load(sin_ptr + angle), 0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    inside = head < HEADS + 2 * KV_HEADS
    if PDL:
        gdc_wait()
    at = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + n
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        low += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias_ptr + n + HALF, mask=inside, other=0.0).to(tl.float32)
    if HEAD_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + eps)[:, None]
        is_query = head < HEADS
        norm = tl.where(is_query, tl.load(q_norm_ptr + i).to(tl.float32), tl.load(k_norm_ptr + i).to(tl.float32))
        low *= tl.where(is_rotated, scale * norm, 1.0)
        norm = tl.where(
            is_query, tl.load(q_norm_ptr + HALF + i).to(tl.float32), tl.load(k_norm_ptr + HALF + i).to(tl.float32)
        )
        high *= tl.where(is_rotated, scale * norm, 1.0)
    low, high = low * cos - high * sin, high * cos + low * sin
    low, high = low.to(q_ptr.dtype.element_ty), high.to(q_ptr.dtype.element_ty)
    to = q_ptr + row * (HEADS * HEAD_DIM) + n
    tl.store(to, low, mask=head < HEADS)
    tl.store(to + HALF, high, mask=head < HEADS)
    is_key = is_rotated & (head >= HEADS) & (slot >= 0)
    to = keys_ptr + (head - HEADS).to(tl.int64) * kv_stride + slot * HEAD_DIM + i
    tl.store(to, low, mask=is_key)
    tl.store(to + HALF, high, mask=is_key)
    is_value = inside & (head >= HEADS + KV_HEADS) & (slot >= 0)
    to = values_ptr + (head - HEADS - KV_HEADS).to(tl.int64) * kv_stride + slot * HEAD_DIM + i
    tl.store(to, low, mask=is_value)
    tl.store(to + HALF, high, mask=is_value)


@triton.jit
def silu_kernel(gate_up_ptr, out_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set out [rows, INNER] = silu(gate) * up of gate_up [rows, 2 * INNER]; program (row, block)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < INNER
    gate = tl.load(gate_up_ptr + row * (2 * INNER) + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * INNER) + INNER + n, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * INNER + n, out.to(out_ptr.dtype.element_ty), mask=inside)

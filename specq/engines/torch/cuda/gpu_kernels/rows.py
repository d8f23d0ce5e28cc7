"""Triton kernels for operations row by row: embedding, norms, rotation, activation.

x f32[rows, hidden] is the residual stream. Each program has one row, or a part of a row.

A row's bits do not depend on the kernel that computes it (docs/decisions/0022). So the kernels here and in `linear`
share the functions below, sums of squares are integers, which add up in any order, and where a compiler might fuse a
product and a sum or not, `fma` says it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SQUARE_UNITS = tl.constexpr(float(1 << 30))  # of a square, in 1; a row's sum stays below 2**33


@triton.jit
def squares_of(x):
    """Return the squares of f32 values in fixed point, i64."""
    return (x * x * SQUARE_UNITS).to(tl.int64)


@triton.jit
def scale_of(squares, HIDDEN: tl.constexpr, eps):
    """Return 1 / rms, f32, of rows whose squares add up to i64 `squares`."""
    return 1.0 / tl.sqrt(tl.fma(squares.to(tl.float32), 1.0 / (SQUARE_UNITS * HIDDEN), eps))


@triton.jit
def rotated(low, high, cos, sin):
    """Return rotary pairs, rotated."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def gated(gate, up):
    """Return silu(gate) * up."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def embed_kernel(
    token_ids_ptr, embedding_ptr, norm_ptr, x_ptr, xw_ptr, squares_ptr,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, NORMS: tl.constexpr, NORMS_PAD: tl.constexpr, STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Set x = the token's embedding, xw = x * norm, and the first of squares i64[NORMS, STRIDE]; the others are 0."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    n = tl.arange(0, HIDDEN_PAD)
    token = tl.load(token_ids_ptr + row).to(tl.int64)
    x = tl.load(embedding_ptr + token * HIDDEN + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * HIDDEN + n, x, mask=n < HIDDEN)
    tl.store(xw_ptr + row * HIDDEN + n, (x * norm).to(xw_ptr.dtype.element_ty), mask=n < HIDDEN)
    index = tl.arange(0, NORMS_PAD)
    tl.store(squares_ptr + index * STRIDE + row, tl.where(index == 0, tl.sum(squares_of(x), 0), 0), mask=index < NORMS)


@triton.jit
def add_norm_kernel(
    x_ptr, delta_ptr, norm_ptr, out_ptr, squares_ptr, rows_ptr, row_stride, column_stride, eps,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, ADD: tl.constexpr, PICK: tl.constexpr, SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Set out [programs, HIDDEN] = RMSNorm(x); with ADD, x += delta first. The strides are delta's.

    With PICK, program i takes row rows[i] of x. With SPLIT, out = x * norm and the scale is left to the reader, who
    gets squares i64[programs].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    to = tl.program_id(0)
    row = tl.load(rows_ptr + to) if PICK else to
    n = tl.arange(0, HIDDEN_PAD)
    x = tl.load(x_ptr + row * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    if ADD:
        x += tl.load(delta_ptr + row * row_stride + n * column_stride, mask=n < HIDDEN, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * HIDDEN + n, x, mask=n < HIDDEN)
    squares = tl.sum(squares_of(x), 0)
    if SPLIT:
        tl.store(squares_ptr + to, squares)
    else:
        x *= scale_of(squares, HIDDEN, eps)
    norm = tl.load(norm_ptr + n, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + to * HIDDEN + n, (x * norm).to(out_ptr.dtype.element_ty), mask=n < HIDDEN)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rotate_kernel(
    qkv_ptr, squares_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr,
    values_ptr, kv_stride, eps,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SHARE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply bias, head norm and rotation to qkv [rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]. Program (row, SHARE heads).

    With SCALED, qkv comes from the xw of rows with i64 squares. Queries go to q, keys and values to their slots. A slot
    of -1 is not written.
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
    scale = scale_of(tl.load(squares_ptr + row), HIDDEN, eps) if SCALED else 1.0
    if HAS_BIAS:
        low = tl.fma(low, scale, tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32))
        high = tl.fma(high, scale, tl.load(bias_ptr + n + HALF, mask=inside, other=0.0).to(tl.float32))
    else:
        low *= scale
        high *= scale
    if HEAD_NORM:
        head_scale = 1.0 / tl.sqrt(tl.sum(low * low + high * high, 1) / HEAD_DIM + eps)[:, None]
        is_query = head < HEADS
        norm = tl.where(is_query, tl.load(q_norm_ptr + i).to(tl.float32), tl.load(k_norm_ptr + i).to(tl.float32))
        low *= tl.where(is_rotated, head_scale * norm, 1.0)
        norm = tl.where(
            is_query, tl.load(q_norm_ptr + HALF + i).to(tl.float32), tl.load(k_norm_ptr + HALF + i).to(tl.float32)
        )
        high *= tl.where(is_rotated, head_scale * norm, 1.0)
    low, high = rotated(low, high, cos, sin)
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
def silu_kernel(
    gate_up_ptr, squares_ptr, out_ptr, eps,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set out [rows, INNER] = silu(gate) * up of gate_up [rows, 2 * INNER]; program (row, block).

    With SCALED, gate_up comes from the xw of rows with i64 squares.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < INNER
    gate = tl.load(gate_up_ptr + row * (2 * INNER) + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * INNER) + INNER + n, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = scale_of(tl.load(squares_ptr + row), HIDDEN, eps)
        gate *= scale
        up *= scale
    out = gated(gate, up)
    tl.store(out_ptr + row * INNER + n, out.to(out_ptr.dtype.element_ty), mask=inside)

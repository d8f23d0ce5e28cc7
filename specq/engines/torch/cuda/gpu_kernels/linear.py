"""Triton kernels for matrix products of few rows, fused with the operations before and after.

With few rows the time of a product is the time to read its weights. So every kernel streams a tile of weight rows past
all rows of the batch. `LANES` = 1 is multiply and add. With more lanes they use the tensor cores, with weights as the
left operand; lanes beyond `ROWS` are zero. With one chain a tensor core adds along K in one order, as the vendor's
products do without a split of K, and a row has the same bits (docs/decisions/0022).

RMSNorm is split so that it needs no pass of its own. The writer of the residual stream `x` also writes `xw` = x times
the next norm's weight, and adds to each row's sum of squares. The reader of `xw` rounds its product to the model's
dtype and then scales it by 1 / rms; see `rows.scale_of`.

x f32[ROWS, hidden]; xw, outputs [ROWS, *] of the model's dtype; squares i64[ROWS]. ROWS is the batch's padded size.

With `PDL` (programmatic dependent launch, compute capability 9) a kernel starts while the previous one ends. It fetches
its first weights before it waits for the previous results. Every kernel waits, for any input, so that the kernel
two launches before is complete. Data that a step's kernels do not write (weights, the batch's integers) may be read
before the wait. So loads follow the order in which their sources become ready. Their values are used as late as
possible.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specq.engines.torch.cuda.gpu_kernels.rows import gated, rotated, scale_of, squares_of


@triton.jit
def prefetch(pointers):
    """Prefetch the 128 bytes at each pointer into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def start_weights(
    w_ptr, n, K: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):
    """Fetch the first of weight rows n of w [*, K], before the input is ready.

    For one lane they are returned, [BLOCK_N, BLOCK_K]. For more lanes they are prefetched into the L2 cache.
    """
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    if LANES == 1:
        k = tl.arange(0, BLOCK_K)
        return tl.load(rows + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
    else:
        if PDL:
            line = tl.arange(0, 16) * 64  # 16 lines of 128 bytes, in elements of 2 bytes
            prefetch(rows + tl.where(line < K, line, 0)[None, :])
        return tl.zeros((1, 1), tl.float32)


@triton.jit
def _load_tiles(x_ptrs, w_ptrs, k, lane, K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Return [BLOCK_N, BLOCK_K] of the weights and [LANES, BLOCK_K] of x, at columns k, zero beyond K and ROWS."""
    if WHOLE and ROWS == LANES:
        return tl.load(w_ptrs, eviction_policy="evict_first"), tl.load(x_ptrs)
    elif WHOLE:
        return tl.load(w_ptrs, eviction_policy="evict_first"), tl.load(x_ptrs, mask=lane < ROWS, other=0.0)
    else:
        mask = k[None, :] < K
        return tl.load(w_ptrs, mask=mask, other=0.0, eviction_policy="evict_first"), tl.load(
            x_ptrs, mask=mask & (lane < ROWS), other=0.0
        )


@triton.jit
def product(
    x_ptr, w_ptr, w, n, K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
):  # fmt: skip
    """Return f32[BLOCK_N, LANES]: weight rows n of w [*, K] times x [ROWS, K], rounded to x's dtype.

    w comes from `start_weights`. With CHAINS 2 it keeps two sums. A tensor core waits for its own last result. This
    wait dominates at few rows.
    """
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if LANES == 1:
        sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0)
            sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
            if K > BLOCK_K:
                mask = start + BLOCK_K + k[None, :] < K
                w = tl.load(w_ptrs + start + BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")
        total = tl.sum(sums, 1)[:, None]
    else:
        lane = tl.arange(0, LANES)[:, None]
        x_ptrs = x_ptr + lane * K + k[None, :]
        sums = tl.zeros((BLOCK_N, LANES), tl.float32)
        others = tl.zeros((BLOCK_N, LANES), tl.float32)
        WHOLE: tl.constexpr = K % (CHAINS * BLOCK_K) == 0
        for start in range(0, K, CHAINS * BLOCK_K):
            tile, x = _load_tiles(x_ptrs + start, w_ptrs + start, start + k, lane, K, ROWS, LANES, WHOLE)
            if CHAINS == 2:
                second = start + BLOCK_K
                tile2, x2 = _load_tiles(x_ptrs + second, w_ptrs + second, second + k, lane, K, ROWS, LANES, WHOLE)
                others = tl.dot(tile2, tl.trans(x2), others, input_precision="ieee")
            sums = tl.dot(tile, tl.trans(x), sums, input_precision="ieee")
        total = sums + others if CHAINS == 2 else sums
    return total.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def halves(sums, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """Return the first and the second half of the rows of f32[BLOCK_N, LANES]."""
    return tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_N // 2, LANES)), (1, 2, 0)))


@triton.jit
def qkv_kernel(
    xw_ptr, squares_ptr, w_ptr, bias_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, keys_ptr, values_ptr, eps,
    kv_stride,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute rotated queries q [ROWS, HEADS * HEAD_DIM], and store rotated keys and values.

    The input is normed. A program computes BLOCK_N / 2 rotary pairs of one head. cos, sin f32[positions, HEAD_DIM / 2].
    keys, values point to the layer's [KV_HEADS, slots, HEAD_DIM]. Heads are kv_stride apart. A slot of -1 is not
    written.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = BLOCK_N // 2
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0) // (HALF // PAIRS)
    first = tl.program_id(0) % (HALF // PAIRS) * PAIRS
    line = tl.arange(0, BLOCK_N)
    n = head * HEAD_DIM + first + line % PAIRS + line // PAIRS * HALF
    w = start_weights(w_ptr, n, HIDDEN, LANES, BLOCK_N, BLOCK_K, PDL)
    i = first + tl.arange(0, PAIRS)
    row = tl.arange(0, LANES)
    angle = tl.load(positions_ptr + row, mask=row < ROWS, other=0)[None, :] * HALF + i[:, None]
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    slot = tl.load(slots_ptr + row, mask=row < ROWS, other=-1).to(tl.int64)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if PDL:
        gdc_wait()
    sums = product(xw_ptr, w_ptr, w, n, HIDDEN, ROWS, LANES, BLOCK_N, BLOCK_K, CHAINS)
    scale = scale_of(tl.load(squares_ptr + row, mask=row < ROWS, other=0), HIDDEN, eps)[None, :]
    sums = tl.fma(sums, scale, bias) if HAS_BIAS else sums * scale
    low, high = halves(sums, BLOCK_N, LANES)
    if head < HEADS + KV_HEADS:
        low, high = rotated(low, high, cos, sin)
    if head < HEADS:
        at = q_ptr + row[None, :] * (HEADS * HEAD_DIM) + head * HEAD_DIM + i[:, None]
        tl.store(at, low.to(q_ptr.dtype.element_ty), mask=row[None, :] < ROWS)
        tl.store(at + HALF, high.to(q_ptr.dtype.element_ty), mask=row[None, :] < ROWS)
    else:
        within = slot * HEAD_DIM + i[:, None]
        if head < HEADS + KV_HEADS:
            at = keys_ptr + (head - HEADS).to(tl.int64) * kv_stride + within
        else:
            at = values_ptr + (head - HEADS - KV_HEADS).to(tl.int64) * kv_stride + within
        tl.store(at, low.to(keys_ptr.dtype.element_ty), mask=slot >= 0)
        tl.store(at + HALF, high.to(keys_ptr.dtype.element_ty), mask=slot >= 0)


@triton.jit
def add_kernel(
    in_ptr, w_ptr, x_ptr, norm_ptr, xw_ptr, squares_ptr,
    HIDDEN: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add in @ w.T to the residual stream x, write xw, and add to the next norm's squares.

    in [ROWS, K]; w [HIDDEN, K]; norm [HIDDEN], the next norm's weight.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < HIDDEN
    safe = tl.where(inside, n, 0)
    row = tl.arange(0, LANES)
    at = row[None, :] * HIDDEN + n[:, None]
    mask = inside[:, None] & (row[None, :] < ROWS)
    if PDL:
        gdc_launch_dependents()
    w = start_weights(w_ptr, safe, K, LANES, BLOCK_N, BLOCK_K, PDL)
    norm = tl.load(norm_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    delta = product(in_ptr, w_ptr, w, safe, K, ROWS, LANES, BLOCK_N, BLOCK_K, CHAINS)
    x += tl.where(mask, delta, 0.0)
    tl.store(x_ptr + at, x, mask=mask)
    tl.store(xw_ptr + at, (x * norm[:, None]).to(xw_ptr.dtype.element_ty), mask=mask)
    tl.atomic_add(squares_ptr + row, tl.sum(squares_of(x), 0), mask=row < ROWS, sem="relaxed")


@triton.jit
def gate_up_kernel(
    xw_ptr, squares_ptr, w_ptr, out_ptr, eps,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out [ROWS, INNER] = silu(gate) * up of the normed input. A program makes BLOCK_N / 2 columns.

    w [2 * INNER, HIDDEN], the gate's rows first.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2
    line = tl.arange(0, BLOCK_N)
    column = tl.program_id(0) * COLUMNS + line % COLUMNS
    n = tl.where(column < INNER, column, 0) + line // COLUMNS * INNER
    if PDL:
        gdc_launch_dependents()
    w = start_weights(w_ptr, n, HIDDEN, LANES, BLOCK_N, BLOCK_K, PDL)
    if PDL:
        gdc_wait()
    row = tl.arange(0, LANES)
    sums = product(xw_ptr, w_ptr, w, n, HIDDEN, ROWS, LANES, BLOCK_N, BLOCK_K, CHAINS)
    sums *= scale_of(tl.load(squares_ptr + row, mask=row < ROWS, other=0), HIDDEN, eps)[None, :]
    gate, up = halves(sums, BLOCK_N, LANES)
    to = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    at = out_ptr + row[None, :] * INNER + to
    tl.store(at, gated(gate, up).to(out_ptr.dtype.element_ty), mask=(to < INNER) & (row[None, :] < ROWS))


@triton.jit
def linear_kernel(
    in_ptr, w_ptr, out_ptr, num_out, K: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute out [ROWS, num_out] = in @ w.T."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_out
    safe = tl.where(inside, n, 0)
    if PDL:
        gdc_launch_dependents()
    w = start_weights(w_ptr, safe, K, LANES, BLOCK_N, BLOCK_K, PDL)
    if PDL:
        gdc_wait()
    sums = product(in_ptr, w_ptr, w, safe, K, ROWS, LANES, BLOCK_N, BLOCK_K, CHAINS)
    row = tl.arange(0, LANES)[None, :]
    at = out_ptr + row.to(tl.int64) * num_out + n[:, None]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (row < ROWS))

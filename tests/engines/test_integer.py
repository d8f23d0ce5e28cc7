"""Integer arithmetic on a GGUF file's own blocks: the bits of plain NumPy, in any batch, on every instruction set."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.quants import dequantize

from bench.random_gguf import TINY, Q, random_rows, write_random
from specq.checkpoints import read_gguf
from specq.engines.native import (
    ALONE,
    INTEGER,
    NativeForward,
    NativeWeights,
    PackedRows,
    RowPacker,
    Threads,
    integer_weights,
    kernels,
)
from specq.engines.native.compiler import SOURCES
from specq.protocol import ConfigError
from specq.runtime.compiler import FLAGS
from specq.testing.integer_reference import IntegerReference, multiply, quantise_groups, read_blocks, rms_norm
from tests.each import each

BLOCKS_OF_32 = (Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)
SUPERBLOCKS = (Q.Q4_K, Q.Q5_K, Q.Q6_K)
FLOATS = (Q.F32, Q.F16, Q.BF16)
WIDE = {**TINY, "hidden": 256, "intermediate": 512, "head_dim": 64}
SLOTS = 256
TOKENS = np.random.default_rng(1).integers(3, 300, 21).tolist()

pytestmark = [
    pytest.mark.skipif(kernels() is None, reason="no C compiler"),
    pytest.mark.usefixtures("own_blocks"),
]


def mixed(name: str):
    """As in a Q4_K_M file, and with other types in one product: gate and up, queries and keys."""
    types = {"token_embd": Q.Q6_K, "attn_v": Q.Q6_K, "attn_k": Q.Q5_K, "ffn_gate": Q.Q5_0, "ffn_down": Q.Q8_0}
    return next((kind for part, kind in types.items() if part in name), Q.Q4_K)


def write(directory: Path, kind=None, **options) -> Path:
    shape = TINY if kind in BLOCKS_OF_32 + FLOATS else WIDE
    return write_random(directory / "model.gguf", mixed if kind is None else lambda _: kind, shape=shape, **options)


def forward(path: Path, threads: Threads = ALONE, library: ctypes.CDLL | None = None) -> NativeForward:
    library = library or kernels(INTEGER)
    return over(integer_weights(path, library, SLOTS)[0], library, threads)


def over(weights: NativeWeights, library: ctypes.CDLL, threads: Threads = ALONE) -> NativeForward:
    shape = len(weights.layers), weights.num_kv_heads, SLOTS, weights.head_dim
    keys, values = (np.zeros(shape, np.float32) for _ in range(2))
    return NativeForward(weights, keys, values, library, threads)


def rows_of(token_ids: list[int], start: int = 0, copies: int = 1) -> PackedRows:
    """Return a text's tokens from `start` on, all judged; `copies` sessions of it, each with its own slots."""
    packer = RowPacker()
    for copy in range(copies):
        table = (np.arange(start + len(token_ids)) + copy * (SLOTS // copies)).astype(np.int32)
        packer.add_session(table)
        for i, token_id in enumerate(token_ids, start):
            packer.add_chain([token_id], [int(table[i])], i, judged=True)
    return packer.pack()


def assert_same_bits(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(ours.view(np.int32), expected.view(np.int32))


@each("kind", [*BLOCKS_OF_32, *SUPERBLOCKS, *FLOATS, None])
def test_a_pass_has_the_bits_of_plain_numpy(kind, tmp_path):
    path = write(tmp_path, kind)
    assert_same_bits(forward(path)(rows_of(TOKENS)).logits, IntegerReference(path)(TOKENS))


def test_rows_have_the_same_bits_alone_in_any_batch_and_with_threads(tmp_path):
    path = write(tmp_path)
    expected = forward(path)(rows_of(TOKENS)).logits
    alone, shared = forward(path), forward(path, Threads(own=3))
    for i, token_id in enumerate(TOKENS):
        assert_same_bits(alone(rows_of([token_id], i)).logits, expected[i : i + 1])
    for copies in (1, 2, 5):  # 105 rows are more than three blocks of rows
        logits = shared(rows_of(TOKENS, copies=copies)).logits
        assert_same_bits(logits, np.concatenate([expected] * copies))


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["x86-64-v3", "x86-64"])
def test_other_instruction_sets_give_the_same_bits(instructions, tmp_path):
    """AVX2 and the portable path."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("not run: this processor has no AVX2")
    flags = [flag.replace("native", instructions) for flag in FLAGS]
    command = [shutil.which("cc") or "cc", str(SOURCES[INTEGER]), "-w", "-o", str(tmp_path / "library.so"), *flags]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(tmp_path / "library.so"))
    for kind in (*BLOCKS_OF_32, *SUPERBLOCKS, None):
        path = write(tmp_path, kind)
        assert_same_bits(forward(path, library=library)(rows_of(TOKENS)).logits, forward(path)(rows_of(TOKENS)).logits)


@each("kind", [*BLOCKS_OF_32, *SUPERBLOCKS])
def test_products_are_near_those_of_dequantised_weights(kind):
    """Rows with outliers; the last group of the narrower matrices is a part of one."""
    rng = np.random.default_rng(2)
    k = 512 if kind in SUPERBLOCKS else 416
    x = (rng.standard_normal((4, k)) * np.where(rng.random(k) < 0.01, 20, 1)).astype(np.float32)
    rows = random_rows(kind, 48, k, rng)
    expected = x.astype(np.float64) @ dequantize(rows, kind).astype(np.float64).T
    error = multiply(x, read_blocks(kind.name, rows)) - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 0.015


def test_a_value_that_is_not_finite_spoils_its_own_row_only(tmp_path):
    path = write(tmp_path)
    weights, _ = integer_weights(path, kernels(INTEGER), SLOTS)
    table = weights.layers[0].attn_norm.copy()
    table[3] = np.nan
    spoilt = replace(weights, layers=[replace(weights.layers[0], attn_norm=table), *weights.layers[1:]])
    assert np.isnan(over(spoilt, kernels(INTEGER))(rows_of(TOKENS)).logits).all()
    wrong = forward(path)
    wrong(rows_of(TOKENS[:4]))
    wrong._keep[1][:, :, 2] = np.inf  # values of position 2, which position 1 does not see
    packer = RowPacker()
    for length in (2, 4):
        packer.add_session(np.arange(SLOTS, dtype=np.int32))
        packer.add_chain([TOKENS[length]], [100 + length], length - 1, judged=True)
    packed = packer.pack()
    logits = wrong(packed).logits
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


def test_blocks_whose_sums_need_more_than_16_bits_have_the_bits_of_plain_numpy(tmp_path):
    """The normed values of one token are nearly equal, so its sums are large."""
    path = write(tmp_path, Q.Q4_K)
    weights, _ = integer_weights(path, kernels(INTEGER), SLOTS)
    reference = IntegerReference(path)
    values = reference._floats["model.embed_tokens.weight"][TOKENS]
    table = 1 / np.where(np.abs(values[3]) < 1e-3, np.float32(1), values[3])
    sums = quantise_groups(rms_norm(values, table, 1e-5)).values.sum(-1)
    assert 15 * sums[3].max() > 2**15
    reference._vectors["model.layers.0.input_layernorm.weight"] = table
    flat = replace(weights, layers=[replace(weights.layers[0], attn_norm=table), *weights.layers[1:]])
    for token_ids in (TOKENS, TOKENS[3:4]):
        assert_same_bits(over(flat, kernels(INTEGER))(rows_of(token_ids)).logits, reference(token_ids))


def test_gates_far_below_zero_are_closed(tmp_path):
    """Where e^x is no finite float."""
    weights, _ = integer_weights(write(tmp_path), kernels(INTEGER), SLOTS)
    first = replace(weights.layers[0], mlp_norm=weights.layers[0].mlp_norm * np.float32(500))
    logits = over(replace(weights, layers=[first, *weights.layers[1:]]), kernels(INTEGER))(rows_of(TOKENS)).logits
    assert np.isfinite(logits).all()


@each(
    ("kind", "place", "message"),
    [
        (Q.Q4_K, 0, r"blk\.1\.ffn_down\.weight \(Q4_K\) has a scale that is not finite, in row 5, block 1;"),
        (Q.Q6_K, 208, r"blk\.1\.ffn_down\.weight \(Q6_K\) has a scale that is not finite, in row 5, block 1;"),
        (Q.Q4_1, 2, r"blk\.1\.ffn_down\.weight \(Q4_1\) has a scale that is not finite, in row 5, block 1;"),
    ],
)
def test_scales_that_are_not_finite_are_refused(kind, place, message, tmp_path):
    path = write(tmp_path, kind)
    tensor = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    num_bytes = {Q.Q4_K: 144, Q.Q6_K: 210, Q.Q4_1: 20}[kind]
    data = bytearray(path.read_bytes())
    at = data.index(tensor.data[5].tobytes()) + num_bytes + place
    data[at : at + 2] = b"\x00\x7e"  # NaN
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        forward(path)


def test_types_that_are_not_supported_are_refused(tmp_path):
    path = write_random(tmp_path / "model.gguf", lambda name: Q.TQ2_0 if "ffn_up" in name else Q.Q4_K, shape=WIDE)
    with pytest.raises(ConfigError, match=r"blk.0.ffn_up.weight has the type TQ2_0; integer arithmetic reads .*Q4_K"):
        forward(path)

"""The bits of a row's attention on a GPU: alone, and beside any other rows. Or in small under Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/engines/test_attention_bits.py      # without a GPU; slow
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from specq.engines.native.compiler import kernels
from specq.engines.native.rows import PackedRows, pack_steps
from specq.engines.torch.cuda.attention_plan import BlockLayout, lay_out, max_list_length
from specq.engines.torch.forward import KvStore
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep, Tree
from tests.devices import HAS_CUDA

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(kernels() is None, reason="no C compiler"),
    pytest.mark.skipif(not HAS_CUDA and not INTERPRETED, reason="no GPU, and TRITON_INTERPRET is not 1"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
# The interpreter has no bfloat16 products.
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float16
GREEDY = SamplingParams()
# Query heads, key-value heads, size of a head; longest context; sessions of a batch.
SHAPES = [(28, 4, 128), (32, 8, 128), (8, 8, 128), (14, 2, 64), (6, 2, 64)] if HAS_CUDA else [(4, 2, 64), (3, 1, 128)]
LONGEST, MOST_SESSIONS, MOST_NODES, MOST_TOKENS = (5000, 12, 24, 200) if HAS_CUDA else (140, 3, 5, 6)


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """Make the interpreter's products the same in each row of a matrix, whatever order NumPy's library adds in."""
    if HAS_CUDA:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_builder, a, b, added, *_options):
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(added.data.dtype)
        return TensorHandle(product + added.data, added.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class Attention:
    """The attention of one layer with random keys and values."""

    def __init__(self, heads: int, kv_heads: int, dim: int, num_slots: int) -> None:
        from specq.engines.torch.cuda.layers import FusedDecoder
        from specq.engines.torch.cuda.weights import DecoderWeights, LayerWeights

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=DTYPE, device=DEVICE)

        qkv, out = make((heads + 2 * kv_heads) * dim, 16), make(16, heads * dim)
        norm, square = make(16), make(16, 16)
        layer = LayerWeights(norm, norm, qkv, None, None, None, out, make(32, 16), square)
        weights = DecoderWeights(
            [layer], square, norm, square, square, square, heads, kv_heads, dim, 16, 1e-6, 2 * dim**-0.5
        )
        keys, values = (torch.randn(1, kv_heads, num_slots, dim).to(DEVICE, DTYPE) for _ in range(2))
        self.decoder = FusedDecoder(weights, KvStore(keys, values), pdl=False)

    def layout(self, num_rows: int, most: int) -> BlockLayout:
        return self.decoder.layout(num_rows, most)

    def __call__(self, rows: PackedRows, layout: BlockLayout, queries: torch.Tensor) -> torch.Tensor:
        """Return the attention of rows, f32[rows, heads * dim]: also bits that bfloat16 would round away."""
        from specq.engines.torch.cuda.layers import Batch

        block = np.zeros(layout.starts()["lists"] + max_list_length(rows), np.int32)
        lay_out(rows, layout, block)
        scratch = self.decoder.scratch(layout)
        scratch.attended = torch.full_like(scratch.attended, torch.nan, dtype=torch.float32)
        scratch.q[: rows.num_rows] = queries
        self.decoder._attention(0, Batch.of(torch.from_numpy(block).to(DEVICE), layout), scratch)
        return scratch.attended[: rows.num_rows]


def random_rows(rng: np.random.Generator, num_slots: int) -> tuple[PackedRows, int]:
    """A prompt's chunk, plain rows, chains and trees after contexts of any length; and the most rows of a session."""
    steps, slots, tables, free = [], [], [], rng.permutation(num_slots).astype(np.int32)
    for i in range(int(rng.integers(2, MOST_SESSIONS + 1))):
        start, kind = int(rng.integers(0, LONGEST)), rng.integers(4)
        num_tokens = int(rng.integers(1, MOST_TOKENS)) if kind == 0 else 1
        num_nodes = int(rng.integers(1, MOST_NODES)) if kind >= 2 else 0
        parents = [k - 1 if kind == 2 or rng.random() < 0.5 else int(rng.integers(-1, k)) for k in range(num_nodes)]
        ones = np.ones(num_nodes, np.int32)
        tree = Tree(ones, np.array(parents, np.int32), ones.astype(np.float32)) if num_nodes else NO_TREE
        steps.append(SessionStep(i, start, np.ones(num_tokens, np.int32), GREEDY, tree))
        own, free = np.split(free, [start + num_tokens + num_nodes])
        tables.append(own[: start + num_tokens])
        slots.append(own[start:])
    rows = pack_steps(steps, np.concatenate(slots), tables)
    return rows, int(np.diff(rows.row_starts).max())


def seen_slots(rows: PackedRows, row: int) -> np.ndarray:
    session = int(np.searchsorted(rows.row_starts, row, "right")) - 1
    extras = rows.extras[rows.extra_starts[row] : rows.extra_starts[row + 1]]
    return np.concatenate([rows.tables[session][: rows.ctx_lens[row]], extras]).astype(np.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_bits_depend_on_its_list_alone(shape):
    """In batches cut in any way, and alone: then all that it sees is committed. Tiles have few or many lines there."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    heads, _, dim = shape
    num_slots = MOST_SESSIONS * (LONGEST + MOST_NODES + MOST_TOKENS)
    attention = Attention(*shape, num_slots)
    for _ in range(4 if HAS_CUDA else 1):
        rows, most = random_rows(rng, num_slots)
        queries = torch.randn(rows.num_rows, heads * dim).to(DEVICE, DTYPE)
        layout = attention.layout(rows.num_rows, most)
        found, *others = (
            attention(rows, replace(layout, num_chunks=count), queries) for count in (layout.num_chunks, 1, 200)
        )
        assert not found.isnan().any()
        for other in others:
            assert torch.equal(found, other)
        for row in rng.permutation(rows.num_rows)[: 200 if HAS_CUDA else 4]:
            slots = seen_slots(rows, row)
            plain = pack_steps([SessionStep(0, len(slots) - 1, np.ones(1, np.int32), GREEDY)], slots[-1:], [slots])
            for lines in (1, 64):
                alone = attention(plain, attention.layout(1, lines), queries[row : row + 1])
                assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_torch(shape):
    torch.manual_seed(1)
    heads, kv_heads, dim = shape
    num_slots = MOST_SESSIONS * (LONGEST + MOST_NODES + MOST_TOKENS)
    attention = Attention(*shape, num_slots)
    rows, most = random_rows(np.random.default_rng(1), num_slots)
    queries = torch.randn(rows.num_rows, heads * dim).to(DEVICE, DTYPE)
    found = attention(rows, attention.layout(rows.num_rows, most), queries)
    for row in range(rows.num_rows):
        slots = torch.from_numpy(seen_slots(rows, row)).to(DEVICE).long()
        keys, values = (kv[0, :, slots].float() for kv in (attention.decoder.kv.keys, attention.decoder.kv.values))
        query = queries[row].float().view(kv_heads, -1, dim)
        weights = (2 * dim**-0.5 * query @ keys.transpose(1, 2)).softmax(-1)
        torch.testing.assert_close(found[row], (weights @ values).flatten(), atol=2e-2, rtol=2e-2)

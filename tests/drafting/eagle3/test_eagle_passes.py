"""Rows and trees of an EAGLE-3 head by kernels of our own are those of plain torch, up to rounding: on a GPU, or under
Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/drafting/eagle3/test_eagle_passes.py      # without a GPU; slow
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from specq.drafting.eagle3.levels import Level, best_first, depths_of, of_ranks, of_sizes, on_device
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.eagle3.passes import Passes
from specq.drafting.rank_trees import RankTree, tree_for
from specq.drafting.trees.cache import StateCache
from specq.drafting.trees.device_trees import PLANES
from specq.drafting.trees.grown_trees import SHAPES
from specq.engines.torch import RowNoise, Sampling, noise_of
from specq.protocol import SamplingParams, Speculation
from specq.testing.checkpoints_eagle import eagle_shape_of
from tests.devices import HAS_CUDA, NEEDS_CUDA, NEEDS_INTERPRETER

pytestmark = NEEDS_CUDA if HAS_CUDA else NEEDS_INTERPRETER
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
HALVES = (torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float16,)  # the interpreter has no bfloat16 products
VOCAB, COLUMNS, HIDDEN, ROOM = 97, 53, 40, 256
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=3)
FIXED = tree_for(Speculation(tree=((0, 0, 0, 1), (0, 2), (1, 1, 0), (9,), (9, 3))), 8)
CHAIN = tree_for(Speculation(tree=((0, 0, 0),)), 8)
WIDE = tree_for(Speculation(tree=tuple((i, j, 0) for i in range(6) for j in range(3))), 24)
ABSENT = -np.inf


class Made(NamedTuple):
    """A random head and what it keeps of texts at places 1, 2 and so on."""

    head: EagleHead
    cache: StateCache

    def passes(self, *, is_fused: bool) -> Passes:
        from specq.drafting.eagle3.fused import FusedEagle

        passes = Passes(self.head, self.cache)
        passes._kernels = FusedEagle(self.head.network, self.head.names) if is_fused else None
        return passes


def make(
    *,
    num_texts: int = 3,
    room: int = ROOM,
    columns: int = COLUMNS,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Made:
    """Logits are a few apart, so that rounding changes no order; places other than the texts' would spoil all."""
    generator = torch.Generator().manual_seed(seed)
    shape = eagle_shape_of(HIDDEN, VOCAB, columns, **sizes)
    network = EagleNetwork(shape, torch.randn(VOCAB, HIDDEN, generator=generator))
    for weight in network.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.4
    network = network.to(DEVICE, dtype).requires_grad_(requires_grad=False)
    network.fuse()
    cache = StateCache(shape.num_key_value_heads, shape.head_dim, HIDDEN, network.fc.weight)
    cache.reserve(room, num_texts + 2)
    for kept in (cache.rows, cache._lasts):
        kept.copy_(torch.randn(kept.shape, generator=generator))
    names = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:columns]).astype(np.int32)
    return Made(EagleHead(network, (0, 1, 2), names if columns < VOCAB else None), cache)


def levels_of(tree: RankTree | int | tuple[int, ...], columns: int = COLUMNS) -> list[Level]:
    if isinstance(tree, tuple):
        return on_device(of_sizes(tree, columns), DEVICE)
    if isinstance(tree, int):
        return on_device(best_first(tree, columns), DEVICE)
    return on_device(of_ranks(tree, columns), DEVICE)


def check(made: Made, levels: list[Level], params: Sequence[SamplingParams], lengths: Sequence[int]) -> None:
    """Grow below texts of these lengths by kernels and plainly, and compare all nodes."""
    num_trees = len(lengths)
    firsts = np.arange(num_trees) * 7
    ends = firsts + np.array(lengths) + 1
    roots = np.stack([np.arange(num_trees, 0, -1), lengths, ends]).astype(np.int32)
    inverse, keys = noise_of([Sampling.of(one) for one in params], ends[:, None] + np.arange(len(levels)))
    noise = RowNoise(torch.from_numpy(inverse).to(DEVICE), torch.from_numpy(keys).to(DEVICE))
    with torch.no_grad():
        found, expected = (
            made.passes(is_fused=fused).grow(torch.from_numpy(roots).to(DEVICE), noise, ROOM, levels).cpu().numpy()
            for fused in (True, False)
        )
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found[1], expected[1])
    assert_lines_equal(found[PLANES:], expected[PLANES:], levels)
    for own, others in zip(found[2:PLANES].view(np.float32), expected[2:PLANES].view(np.float32), strict=True):
        np.testing.assert_allclose(own, others, atol=2e-3)
    there = expected[3].view(np.float32) > ABSENT
    np.testing.assert_array_equal(found[0][there], expected[0][there])


def assert_lines_equal(found: np.ndarray, expected: np.ndarray, levels: list[Level]) -> None:
    """Compare what lines say of levels above each node, and of its own."""
    depths = depths_of(levels)
    for i, (own, others) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(own[:, depths >= i], others[:, depths >= i])


@pytest.mark.parametrize("tree", [1, 2, 5, FIXED, CHAIN, WIDE], ids=["1", "2", "5", "fixed", "chain", "wide"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_of_one_text(params: SamplingParams, tree: RankTree | int) -> None:
    """Best first and of a shape; its context is longer than one program of attention reads."""
    check(make(), levels_of(tree), [params], [150])


@pytest.mark.parametrize("tree", [4, FIXED, (1, 6, 3, 2)], ids=["best first", "of a shape", "of sizes"])
def test_trees_of_several_texts(tree: RankTree | int | tuple[int, ...]) -> None:
    """Of contexts of different lengths, each with noise of its own or none: of one row, of whole blocks, and of the
    whole room."""
    mixed = [SAMPLED, GREEDY, SamplingParams(temperature=1.3, seed=4)]
    check(make(), levels_of(tree), mixed, [1, ROOM, 64])


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
        {"num_attention_heads": 20, "num_key_value_heads": 1},
        {"intermediate_size": 1030},
        {"has_head_norms": True},
    ],
    ids=str,
)
def test_heads_of_other_sizes(sizes: dict[str, int]) -> None:
    check(make(**sizes), levels_of(3), [SAMPLED, GREEDY], [70, 9])
    check(make(**sizes), levels_of(WIDE), [SAMPLED], [70])


def test_a_head_that_adds_to_the_normed_state() -> None:
    check(make(norm_before_residual=True), levels_of(3), [GREEDY], [20])


def test_a_head_of_all_tokens() -> None:
    """Which has no names for its columns."""
    check(make(columns=VOCAB), levels_of(3, VOCAB), [SAMPLED], [20])


def test_fewer_tokens_than_are_ranked_and_no_number() -> None:
    """A level of fewer nodes than rows could be expanded; where the logits are none, no row is taken twice, and nothing
    is read beside what is there."""
    check(make(columns=3), levels_of(4, 3), [SAMPLED], [20])
    made = make()
    made.cache._lasts[1] = torch.nan
    levels = levels_of(3)
    roots = torch.tensor([[1], [20], [21]], dtype=torch.int32, device=DEVICE)
    noise = RowNoise(torch.zeros(1, device=DEVICE), torch.zeros(1, 3, 2, dtype=torch.int32, device=DEVICE))
    found = made.passes(is_fused=True).grow(roots, noise, ROOM, levels).cpu().numpy()
    assert (found[3].view(np.float32) == ABSENT).all()
    assert found[1, 0, 8:40].tolist() == np.arange(4).repeat(8).tolist()


def test_trees_of_all_usual_sizes_share_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new size must not wait for the compiler. Only the first and the last level have other constants."""
    from specq.drafting.eagle3 import fused
    from specq.drafting.trees import fused_layers
    from specq.engines.torch.cuda import top as fused_top

    constants = set[tuple[str, object]]()

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, _: object) -> Callable[..., None]:
            return lambda *_, **given: constants.add((self._name, tuple(given.items())))

    for module in (fused, fused_layers, fused_top):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Noted(name))
    for level_sizes in (*SHAPES, (1, 1), (4, 8, 8, 8, 8)):
        for num_trees in (1, 3):
            levels, roots = levels_of(level_sizes), torch.ones(3, num_trees, dtype=torch.int32, device=DEVICE)
            keys = torch.zeros(num_trees, len(levels), 2, dtype=torch.int32, device=DEVICE)
            noise = RowNoise(torch.zeros(num_trees, device=DEVICE), keys)
            make().passes(is_fused=True).grow(roots, noise, ROOM, levels)
    counts = Counter(name for name, _ in constants)
    assert counts.pop("descend_kernel") == 3
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """On the whole: where rounding decides what is likelier, trees differ below."""
    made, levels = make(dtype=dtype), levels_of(3)
    roots = torch.tensor([[1], [100], [101]], dtype=torch.int32, device=DEVICE)
    noise = RowNoise(torch.zeros(1, device=DEVICE), torch.zeros(1, 3, 2, dtype=torch.int32, device=DEVICE))
    with torch.no_grad():
        found, expected = (made.passes(is_fused=fused).grow(roots, noise, ROOM, levels) for fused in (True, False))
    for own, others in zip(found[2:].view(torch.float32), expected[2:].view(torch.float32), strict=True):
        difference = (own.sort().values - others.sort().values).abs().mean()
        assert difference < (0.01 if dtype == torch.float16 else 0.15)


def test_what_ranks_many_tokens_is_grown_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    passes = made.passes(is_fused=True)
    monkeypatch.setattr(passes._kernels, "most_ranked", 7)
    monkeypatch.setattr(passes._kernels, "trees", None)
    roots = torch.tensor([[1], [20], [21]], dtype=torch.int32, device=DEVICE)
    noise = RowNoise(torch.zeros(1, device=DEVICE), torch.zeros(1, 2, 2, dtype=torch.int32, device=DEVICE))
    with torch.no_grad():
        assert passes.grow(roots, noise, ROOM, levels_of(2)).shape == (4, 1, 40)


@pytest.mark.parametrize(
    ("num_rows", "room", "lengths", "counts"),
    [
        (4, ROOM, [0, 63, 252], [4, 1, 3]),
        (16, 512, [0, 200], [16, 13]),
        (128, ROOM, [0], [128]),
        (128, ROOM, [70], [100]),
    ],
)
def test_rows_of_texts(num_rows: int, room: int, lengths: list[int], counts: list[int]) -> None:
    """Of texts that have none yet, and behind others; some have fewer than the pass has, and a place in the batch is
    nobody's."""
    size, rng = 1 << (len(lengths) - 1).bit_length(), np.random.default_rng(0)
    starts = np.cumsum(counts) - counts
    texts = np.zeros((5, size), np.int32)
    texts[:, : len(lengths)] = (
        np.arange(len(lengths), 0, -1),
        np.arange(1, 1 + len(lengths)) * 5,
        lengths,
        counts,
        starts,
    )
    given = np.zeros((2, size * num_rows), np.int32)
    given[:, : sum(counts)] = rng.permutation(sum(counts)), rng.integers(0, VOCAB, sum(counts))
    taps = torch.from_numpy(rng.normal(0, 1, (size * num_rows, 3 * HIDDEN)).astype(np.float32)).to(DEVICE)
    kept = []
    for is_fused in (True, False):
        made = make(room=room)
        with torch.no_grad():
            passes = made.passes(is_fused=is_fused)
            passes.follow(room, taps, *(torch.from_numpy(each).to(DEVICE) for each in (given, texts)))
        kept.append((made.cache.rows[:, 1:], made.cache._lasts[1:]))
    for found, expected in zip(*kept, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)

"""An EAGLE-3 head by plain arithmetic, beside the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from specq.drafting.eagle3 import passes as eagle_passes
from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.host import HostEagle
from specq.drafting.eagle3.loading import EagleHead, load_eagle
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.rank_trees import RankTree
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked
from specq.protocol import ModelInfo, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.growth import grow
from specq.verification.sampling import perturbed_scores
from specq.verifier.sources import Followed
from tests.devices import NEEDS_CUDA, NEEDS_INTERPRETER
from tests.replaying import StandIn

HIDDEN, COLUMNS = 40, 23


SHAPE = eagle_shape_of(HIDDEN, VOCAB, COLUMNS, layers=(0, 1, 2))


INFO = ModelInfo("target", "", "", "torch", VOCAB, VOCAB, (), 600, "")


GREEDY = SamplingParams()


SAMPLED = SamplingParams(temperature=0.8, seed=3)


EVERYTHING = -np.inf


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle(tmp_path_factory.mktemp("head"), SHAPE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


def on_gpu(head: EagleHead) -> EagleHead:
    """The same head on a GPU, in float32."""
    network = deepcopy(head.network).cuda()
    network.fuse()
    return replace(head, network=network)


@pytest.fixture(scope="module")
def plain(made: Path, target: Path) -> EagleHead:
    return load_eagle(str(made), str(target), INFO, "cpu")


@pytest.fixture(
    params=[
        "as needed",
        "without torch",
        "recorded",
        pytest.param("by kernels", marks=NEEDS_INTERPRETER),
        pytest.param("on a GPU", marks=NEEDS_CUDA),
    ]
)
def head(
    request: pytest.FixtureRequest, plain: EagleHead, made: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> Eagle | HostEagle:
    if request.param == "without torch":
        return HostEagle(load_arrays(str(made), str(target), INFO))
    if request.param == "on a GPU":
        return Eagle(on_gpu(plain))
    if request.param == "by kernels":
        from specq.drafting.eagle3.fused import FusedEagle

        monkeypatch.setattr(eagle_passes, "eagle_kernels", lambda head: FusedEagle(head.network, head.names))
    return Eagle(plain, None if request.param == "as needed" else StandIn())


class Text:
    """A random text and the target's hidden states of its rows."""

    def __init__(self, seed: int, length: int) -> None:
        rng = np.random.default_rng(seed)
        self.token_ids = rng.integers(0, VOCAB, length).tolist()
        self.states = torch.from_numpy(rng.normal(0, 1, (length, 3 * HIDDEN)).astype(np.float32))

    def part(self, session_id: int, first: int, end: int, offset: int = 0) -> Followed:
        """The tokens from `first` up to `end`, where the states of the text begin at this row."""
        return Followed(session_id, first, self.token_ids[first:end], range(offset + first - 1, offset + end - 1))

    def expected(self, network: EagleNetwork, path: Sequence[int], end: int, first: int = 1) -> torch.Tensor:
        """What the head says behind a path below the context of `end` tokens, if it knows them from `first` on."""
        tokens, states = [*self.token_ids[first:end], *path], self.states[first - 1 : end - 1]
        return said(network, states, tokens, first)


@torch.inference_mode()
def said(network: EagleNetwork, taps: torch.Tensor, token_ids: Sequence[int], first: int) -> torch.Tensor:
    """What a network says behind tokens, of which those beyond the target's states are read with its own: in whole
    passes."""
    states = network.project(taps)
    while True:
        count = len(states)
        mask = torch.ones(count, count, dtype=torch.bool).tril()

        def attend(queries: Any, keys: Any, values: Any, mask: torch.Tensor = mask) -> Any:
            moved = (part.transpose(1, 2) for part in (queries, keys, values))
            return scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True).transpose(1, 2)

        rotations = network.rotations(torch.arange(count)[None] + first - 1, states.dtype)
        found = network(states[None], torch.tensor([token_ids[:count]]), rotations, attend)[0]
        if count == len(token_ids):
            return network.logits(found[-1])
        states = torch.cat([states, found[-1:]])


Known = dict[int, tuple[Text, int, int]]  # by session: a text, its end, and the first token that is known


def observe(head: Eagle | HostEagle, states: torch.Tensor, followed: Sequence[Followed]) -> None:
    head.observe(head.copied(states.numpy()), followed)


class Plainly:
    """Growth by plain arithmetic, each row by itself. Fulfils `specq.testing.growth.Growth`."""

    def __init__(self, plain: EagleHead, texts: Known, params: Sequence[SamplingParams]) -> None:
        assert plain.token_ids is not None
        self.network, self.names = plain.network, plain.token_ids
        self.texts, self.params = list(texts.values()), params
        self.paths: list[list[list[int]]] = [[[]] for _ in self.texts]

    def ranked(self, count: int) -> Ranked:
        found = [
            [self._row(*text, params, path, count) for path in paths]
            for text, params, paths in zip(self.texts, self.params, self.paths, strict=True)
        ]
        tokens, scores = ([[row[i] for row in rows] for rows in found] for i in (0, 1))
        return Ranked(np.array(tokens, np.int32), np.array(scores, np.float32))

    def _row(
        self, text: Text, end: int, first: int, params: SamplingParams, path: list[int], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        logits = text.expected(self.network, path, end, first)[None]
        scores = perturbed_scores(logits, [params], [end + len(path)], self.names)[0].log_softmax(0)
        best, columns = scores.sort(descending=True, stable=True)
        return self.names[columns[:count].numpy()], best[:count].numpy()

    def expand(self, parents: Any, token_ids: Any) -> None:
        self.paths = [
            [[*paths[parent], token] for parent, token in zip(behind, tokens, strict=True)]
            for paths, behind, tokens in zip(self.paths, parents.tolist(), token_ids.tolist(), strict=True)
        ]


def scores_of(grown: Grown, tree: int) -> dict[tuple[int, ...], tuple[float, float]]:
    """Score and reach of each path of a tree, where there is a node."""
    paths: list[tuple[int, ...]] = []
    for token, parent, depth in zip(grown.token_ids[tree], grown.parents[tree], grown.depths, strict=True):
        above = paths[parent] if parent >= 0 else ()
        assert len(above) == depth
        paths.append((*above, int(token)))
    scores = zip(grown.scores[tree].tolist(), grown.reach[tree].tolist(), strict=True)
    return {path: both for path, both in zip(paths, scores, strict=True) if np.isfinite(both[1])}


def check(
    head: Eagle | HostEagle,
    plain: EagleHead,
    texts: Known,
    params: Sequence[SamplingParams] = (),
    *,
    depth: int = 2,
    ranks: RankTree | None = None,
    sizes: tuple[int, ...] = (),
) -> None:
    """Grow a tree below each text, and compare all nodes."""
    params = params or [GREEDY] * len(texts)
    request = TreeRequest(list(texts), params, depth, ranks, EVERYTHING, sizes)
    (pending,) = head.start([request])
    found, expected = pending.collect(), grow(Plainly(plain, texts, params), request)
    for tree in range(len(texts)):
        own, theirs = scores_of(found, tree), scores_of(expected, tree)
        own = {path: both for path, both in own.items() if len(path) <= depth or ranks is not None}
        assert own.keys() == theirs.keys()
        np.testing.assert_allclose([own[path] for path in theirs], list(theirs.values()), atol=3e-4)

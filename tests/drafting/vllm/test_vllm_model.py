"""The `vllm` proposer drafts what `draft-model` drafts. `make test-vllm`."""

from __future__ import annotations

import numpy as np
import pytest

from specq.drafting import Expansion
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.vllm.drafter import VllmModel
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.testing.checkpoints import make_checkpoint, random_tokens
from tests.devices import NEEDS_VLLM, vllm_arguments

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def pair(tmp_path_factory, vllm_device):
    """The two proposers, with the same model on the same device, and the same random numbers."""
    directory = str(make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama")))
    shared = {"device": vllm_device, "dtype": "float32", "distribution_size": 16, "kv_slots": 1024}
    ours = VllmModel(directory, rng=np.random.default_rng(3), **shared | vllm_arguments(vllm_device))
    yield ours, DraftModel(directory, rng=np.random.default_rng(3), **shared)
    ours.shutdown()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(temperature=0.7, top_k=20, strategy="probabilistic"),
    ],
    ids=["greedy", "sampled", "drawn"],
)
def test_drafts_are_those_of_draft_model(pair, params):
    """Children, in order, with their distributions; before and after commits that follow the tree and that leave it."""
    context = random_tokens(np.random.default_rng(1), 40)
    found = []
    for proposer in pair:
        drafted = []
        proposer.open(1, context, params)
        requests = [Expansion(1, -1, (0, 1, 2))]
        for level in range(4):
            answers = proposer.expand(requests)
            drafted += answers
            first = requests[0].child_ids[0]
            if level == 1:
                proposer.commit(1, answers[0].token_ids[:1], [])
            requests = [Expansion(1, first if level % 2 == 0 else -1, tuple(range(10 * level + 10, 10 * level + 13)))]
        proposer.close(1)
        found.append(drafted)
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.distribution is None) == (theirs.distribution is None) == (params.strategy != "probabilistic")
        if ours.distribution is not None:
            assert ours.distribution.ids.tolist() == theirs.distribution.ids.tolist()
            assert np.abs(ours.distribution.weights.astype(int) - theirs.distribution.weights).max() <= 4


def test_a_node_that_was_cut_is_an_error(pair):
    pair[0].open(2, random_tokens(np.random.default_rng(2), 5), SamplingParams())
    pair[0].expand([Expansion(2, -1, (0, 1))])
    pair[0].commit(2, np.array([7, 8], np.int32), [])
    with pytest.raises(EngineError, match="draft node 1 is unknown or was removed"):
        pair[0].expand([Expansion(2, 1, (2,))])
    pair[0].close(2)

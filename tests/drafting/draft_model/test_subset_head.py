"""Drafts of a model whose head knows only some tokens: in the target's token ids, with the noise of those ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.drafting import CONTEXT, Expansion
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.drafter import DraftModel
from specq.protocol import SamplingParams
from specq.protocol.draft_checks import fits, mismatch
from specq.testing import DrafterConformance
from specq.testing.checkpoints_draft import VOCAB, draft_logits, head_tokens, make_draft
from specq.testing.toy import toy_info
from specq.verification.sampling import choose_tokens, perturbed_scores, target_probs

SAMPLED = SamplingParams(temperature=0.8, seed=5)
CUT = SamplingParams(temperature=0.8, top_k=5, top_p=0.95, seed=6)
DRAWN = SamplingParams(temperature=0.9, strategy="probabilistic")
KINDS = pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
DEPTH = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def context():
    return np.random.default_rng(1).integers(0, VOCAB, 30).astype(np.int32)


def expand(directory, context, params, count: int, limit_vocab: int = VOCAB):
    draft = DraftModel(str(directory), device="cpu", kv_slots=256, rng=np.random.default_rng(0))
    draft.limit_vocab = limit_vocab
    draft.open(1, context, params)
    (children,) = draft.expand([Expansion(1, CONTEXT, tuple(range(count)))])
    return children


@KINDS
def test_children_are_the_best_tokens_of_the_whole_vocabulary(directory, context, params):
    """The noise is that of the token, not of its row in the head: the scores are those of logits over all tokens, of
    which the head's lacking ones are -inf."""
    scores = perturbed_scores(draft_logits(directory, context.tolist())[None], [params], [len(context)])[0]
    best = scores.topk(3)

    children = expand(directory, context, params, 3)

    assert children.token_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(children.scores, torch.log_softmax(scores, -1)[best.indices], atol=1e-3)


def test_it_guesses_what_a_target_of_its_own_logits_draws(directory, context):
    """At every position, at T = 0.8: this is the whole worth of shared noise."""
    draft = DraftModel(str(directory), device="cpu", kv_slots=1024)
    for seed in range(40):
        params = SamplingParams(temperature=0.8, seed=seed)
        (drawn,) = choose_tokens(draft_logits(directory, context.tolist())[None], [params], [len(context)])
        draft.open(seed, context, params)
        (children,) = draft.expand([Expansion(seed, CONTEXT, (0,))])
        assert children.token_ids.tolist() == [drawn]


@KINDS
def test_chains_follow_their_first_tokens(directory, context, params):
    source = ChainModel(str(directory), device="cpu", kv_slots=256)
    source.open(1, context, params)
    drafted = source.start([1], DEPTH, 1).collect().token_ids[0, :, 0].tolist()

    text = context.tolist()
    for token in drafted:
        (expected,) = choose_tokens(draft_logits(directory, text)[None], [params], [len(text)])
        assert token == expected
        text.append(token)
    assert set(drafted) <= set(head_tokens(directory))


def test_draft_distributions_speak_of_the_targets_tokens(directory, context):
    children = expand(directory, context, DRAWN, 3)
    probs = target_probs(draft_logits(directory, context.tolist())[None], [DRAWN])[0]

    ids, weights = children.distribution.ids, children.distribution.weights
    assert len(ids) == 32
    assert set(children.token_ids.tolist()) <= set(ids.tolist()) <= set(head_tokens(directory))
    assert ids.tolist() == probs.topk(32).indices.tolist()
    np.testing.assert_allclose(weights / 65535, (probs[ids] / probs.max()).numpy(), atol=1e-3)


@pytest.mark.parametrize("params", [SAMPLED, DRAWN], ids=["ranked", "drawn"])
def test_no_child_lies_beyond_a_limit(directory, context, params):
    known = head_tokens(directory)
    children = expand(directory, context, params, 5, limit_vocab=known[7])
    assert len(children.token_ids) == 5
    assert set(children.token_ids.tolist()) <= set(known[:7])


def test_a_model_for_another_tokenizer_fits_no_target(directory):
    draft = DraftModel(str(directory), device="cpu", kv_slots=64).info
    assert fits(draft, toy_info(tokenizer="a" * 64))
    assert not fits(draft, toy_info(tokenizer="b" * 64))
    assert "aaaaaaaaaaaa" in mismatch(draft, [toy_info(tokenizer="b" * 64)])


class TestConformance(DrafterConformance):
    """All that any drafter must do."""

    @pytest.fixture
    def drafter(self, directory):
        return DraftModel(str(directory), device="cpu")

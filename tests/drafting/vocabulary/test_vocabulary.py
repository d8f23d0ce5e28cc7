"""Draft models of another vocabulary: what they draft is the target's, exactly as it is sent, and costs no more KV than
it must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.drafting import CONTEXT, Expansion, bridge
from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.draft_model.making import level_times
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.interface import NodeChains
from specq.drafting.suffix.ngram import NgramDrafter
from specq.drafting.vocabulary import in_vocabulary
from specq.drafting.vocabulary.shared import SharedMaker, renamed
from specq.models import resolve_model
from specq.protocol import ConfigError, SamplingParams
from specq.testing import DrafterConformance
from specq.testing.checkpoints import VOCAB, load_reference, make_renumbered, reference_logits
from specq.testing.checkpoints_draft import PARALLEL, make_draft
from specq.testing.exact import ExactWorld, error, point, sampled
from specq.testing.toy_drafters import commit_one
from specq.text import SharedTokens, TextCodec, load_tokenizer_files
from specq.verification.sampling import perturbed_scores, target_probs
from tests.drafting.vocabulary.drafts import (
    BOTH,
    DRAWN,
    INFO,
    PIECES,
    TEXT,
    TRAINED,
    chain,
    directory,
    drafter,
    shared,
)

__all__ = ["directory", "drafter"]  # fixtures


SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=5)


class TestConformance(DrafterConformance):
    """Around a draft model, and around one that has no logits and cannot go back."""


def test_it_stands_for_a_drafter_of_the_targets_vocabulary(directory):
    info = shared(directory)[1].info
    assert (info.tokenizer_hash, info.num_tokens, info.vocab_size, info.eos_ids) == ("trained", 350, 350, (2,))


@pytest.fixture(scope="module", params=["shared", "text", "shared of parallel", "text of parallel"])
def pair(request, directory, tmp_path_factory):
    """A draft model, and what stands around it."""
    way, _, kind = request.param.partition(" of ")
    model = make_draft(tmp_path_factory.mktemp("parallel"), PARALLEL) if kind else directory
    draft = draft_trees(Contexts(str(model), device="cpu", kv_slots=2048))
    return draft, in_vocabulary(draft, way, BOTH, INFO)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_drafts_are_target_tokens_for_any_committed_text(data, pair):
    """And the KV of a session is that of its text: no slot is lost."""
    draft, drafter = pair
    drafter.close(1)
    token = st.integers(0, INFO.num_tokens - 1)
    context = data.draw(st.lists(token, min_size=1, max_size=20))
    params = data.draw(st.sampled_from([SamplingParams(), SAMPLED, DRAWN]))
    drafter.open(1, np.array(context, np.int32), params)
    for _ in range(4):
        token_ids, node_ids = chain(drafter, 4)
        assert all(0 <= i < INFO.num_tokens for i in token_ids)
        followed = data.draw(st.integers(0, len(token_ids)))
        others = data.draw(st.lists(token, min_size=int(not followed), max_size=3))
        drafter.commit(1, np.array([*token_ids[:followed], *others], np.int32), node_ids[:followed])
    drafter.close(1)
    assert draft.free_slots == 2048


# --- shared -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_start(monkeypatch):
    """Without a token before the text, as the reference has it."""
    monkeypatch.setattr(PIECES, "before", [])


@pytest.mark.usefixtures("plain_start")
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_shared_children_are_the_best_of_the_tokens_that_both_have(directory, params):
    """With the noise of the target's token at the target's position, though both differ from the draft model's."""
    _, drafter = shared(directory)
    drafter.open(1, np.array(TEXT, np.int32), params)
    token_ids, _ = chain(drafter, 3)
    assert len(BOTH.retell(TEXT)) != len(TEXT)
    for depth, token in enumerate(token_ids):
        position = len(TEXT) + depth
        scores = perturbed_scores(restricted(directory, TEXT, token_ids[:depth])[None], [params], [position])[0]
        assert token == int(scores.argmax())


def restricted(directory, context_ids, drafted):
    """Return the reference's logits over the target's tokens after drafted ones, -inf where the draft model has
    none."""
    to_draft = dict(zip(BOTH.shared.target_ids.tolist(), BOTH.shared.draft_ids.tolist(), strict=True))
    told = [*BOTH.retell(context_ids), *(to_draft[i] for i in drafted)]
    own = reference_logits(load_reference(directory), [min(token, VOCAB - 1) for token in told])
    logits = torch.full((INFO.num_tokens,), -torch.inf)
    both = BOTH.shared.within(VOCAB, INFO.num_tokens)
    logits[torch.from_numpy(both.target_ids).long()] = own[torch.from_numpy(both.draft_ids).long()]
    return logits


@pytest.mark.usefixtures("plain_start")
def test_the_distribution_that_is_sent_is_the_restricted_one_and_is_drawn_from(directory):
    _, drafter = shared(directory, distribution_size=VOCAB)
    expected = target_probs(restricted(directory, TEXT, [])[None], [DRAWN])[0].numpy()
    drawn = Counter()
    count = 600
    for session_id in range(count):
        drafter.open(session_id, np.array(TEXT, np.int32), DRAWN)
        (children,) = drafter.expand([Expansion(session_id, CONTEXT, (0, 1))])
        drawn[int(children.token_ids[0])] += 1
        assert set(children.token_ids.tolist()) <= set(children.distribution.ids.tolist())
        drafter.close(session_id)
    ids, weights = children.distribution.ids, children.distribution.weights
    assert weights[ids >= 0] / weights.sum() == pytest.approx(expected[ids[ids >= 0]], abs=1e-4)
    assert expected[ids[ids >= 0]].sum() == pytest.approx(1, abs=1e-2)
    for token, number in drawn.most_common(5):
        assert number / count == pytest.approx(expected[token], abs=0.08)


def shared_world(entropy, **params):
    """A toy target of four tokens, and what a draft model of five others sends for it, of which three are shared."""
    shared_ids = np.array([0, 2, 3]), np.array([4, 0, 1])  # the target's, the draft model's

    class Restricted(ExactWorld):
        def draft(self, prefix):
            rng = np.random.default_rng((entropy, *prefix))
            logits = torch.from_numpy(rng.normal(0, 1.5, (1, 5)).astype(np.float32))
            maker = made_of(shared_ids, lead=7)
            (children,) = maker.make([request_of(self.params)], logits, 5)
            sent = named(children, shared_ids).distribution
            kept = sent.ids >= 0
            return sent.ids[kept].tolist(), sent.weights[kept].tolist()

    return Restricted(entropy, 4, 3, SamplingParams(**{"temperature": 1.0, "strategy": "probabilistic"} | params))


def made_of(shared_ids, lead):
    both = SharedTokens(shared_ids[1].astype(np.int32), shared_ids[0].astype(np.int32), 4)
    return SharedMaker(ChildMaker(32, np.random.default_rng(0)), both, lambda session_id: lead)


def request_of(params):
    return ChildRequest(params, 3, 3, 1)


def named(children, shared_ids):
    order = np.argsort(shared_ids[1])
    return renamed(children, shared_ids[1][order].astype(np.int32), shared_ids[0][order].astype(np.int32))


PLANS = {
    "chain": ((sampled(sampled()),), 3),
    "candidates": ((sampled(), sampled(), sampled()), 2),
    "tree": ((sampled(sampled(), sampled()), sampled()), 3),
    "mixed": ((sampled(point()), point(sampled())), 3),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 2.0}], ids=str)
def test_acceptance_is_exact_with_restricted_distributions(plan, params):
    """All that may be drawn is enumerated, and all that the judge may make of it integrated."""
    assert error(shared_world(11, **params), *PLANS[plan]) < 1e-9


def test_the_noise_is_that_of_the_targets_position(directory):
    """A request reaches the maker with the place of its token in the target's text."""
    seen = []

    class Watching(ChildMaker):
        def make(self, wanted, logits, limit_vocab):
            seen.extend(one.position for one in wanted)
            return super().make(wanted, logits, limit_vocab)

    draft = DraftModel(str(directory), device="cpu", kv_slots=1024)
    draft.maker = Watching(32, np.random.default_rng(0))
    drafter = in_vocabulary(draft, "shared", BOTH, INFO)
    drafter.open(1, np.array(TEXT, np.int32), SAMPLED)
    token_ids, node_ids = chain(drafter, 3)
    drafter.commit(1, np.array([*token_ids[:2], 5, 6, 7], np.int32), node_ids[:2])
    chain(drafter, 2)
    assert seen == [len(TEXT) + i for i in (0, 1, 2, 5, 6)]


def spelled_out(text):
    """Return the target's tokens for single bytes: the draft model's words change as they grow."""
    return [TRAINED.id_of(bytes([byte])) for byte in text]


def test_after_corrections_it_drafts_as_for_a_session_that_begins_there(directory):
    """What was taken back of the draft model's text is gone, and what was kept stands where it stood."""
    _, drafter = shared(directory)
    text = TEXT * 3
    drafter.open(1, np.array(text, np.int32), SamplingParams())
    for token in spelled_out(b" return the eggs return"):
        chain(drafter, 2)
        drafter.commit(1, np.array([token], np.int32), [])
        text = [*text, token]
        drafter.open(2, np.array(text, np.int32), SamplingParams())
        assert chain(drafter, 3, 1)[0] == chain(drafter, 3, 2)[0]
        drafter.close(2)


def test_a_correction_computes_no_more_than_what_changed(directory, monkeypatch):
    """KV is kept up to where the two cuts of the text part."""
    draft, drafter = shared(directory)
    drafter.open(1, np.array(TEXT * 12, np.int32), SamplingParams())
    chain(drafter, 1)
    num_before = draft.free_slots
    rows = []
    run = draft._contexts.run
    monkeypatch.setattr(draft._contexts, "run", lambda packed: rows.append(packed.num_rows) or run(packed))
    for token in spelled_out(b" return the eggs"):
        drafter.commit(1, np.array([token], np.int32), [])
        chain(drafter, 1)
    assert max(rows) <= 2  # of a text of more than 100 tokens
    assert num_before - draft.free_slots < 40


def test_without_logits_shared_is_refused_and_text_named():
    with pytest.raises(ConfigError, match=r"ngram returns no logits, .* shared needs; use vocabulary = text"):
        in_vocabulary(NgramDrafter(), "shared", BOTH, INFO)


def test_without_a_shared_token_shared_is_refused(directory):
    draft = DraftModel(str(directory), device="cpu", kv_slots=64)
    with pytest.raises(ConfigError, match="cannot draft any token of the target; use vocabulary = text"):
        in_vocabulary(draft, "shared", BOTH, replace(INFO, num_tokens=0))


# --- a model whose tokens have other numbers
# ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory):
    """The bundled draft model, for a target of another vocabulary."""
    return str(make_renumbered(Path(resolve_model("tiny", "draft")), tmp_path_factory.mktemp("renumbered")))


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_a_model_whose_tokens_have_other_numbers_drafts_the_same(renumbered, params):
    """Noise, positions and scores are the target's: nothing is lost on the way."""
    files = load_tokenizer_files(resolve_model("tiny", "target"))
    plain = DraftModel(resolve_model("tiny", "draft"), device="cpu", kv_slots=512)
    other = DraftModel(renumbered, device="cpu", kv_slots=512)
    bridged = bridge(other.info, "shared", load_tokenizer_files(renumbered), files, "tiny")(other)
    context = TextCodec(files).encode_chat([{"role": "user", "content": "What is 12 times 7?"}])
    drafts = []
    for one in (plain, bridged):
        one.open(1, np.array(context, np.int32), params)
        drafts.append(chain(one, 8)[0])
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 8


@pytest.mark.parametrize("way", ["shared", "text"])
def test_chains_of_a_proposer_are_what_a_colocated_drafter_takes(renumbered, way):
    """As with a draft model of the target's vocabulary: levels, what was foreseen, and profiling."""
    files = load_tokenizer_files(resolve_model("tiny", "target"))
    other = DraftModel(renumbered, device="cpu", kv_slots=1024)
    chains = NodeChains(bridge(other.info, way, load_tokenizer_files(renumbered), files, "tiny")(other))
    assert level_times(chains, [1, 2], 2, {1, 3})[0] > 0
    context = TextCodec(files).encode_chat([{"role": "user", "content": "What is 12 times 7?"}])
    for session_id in (1, 2):
        chains.open(session_id, np.array(context, np.int32), SamplingParams())
    found = chains.start([1, 2], 4, 2).collect()
    assert found.token_ids.shape == found.scores.shape == (2, 4, 2)
    firsts = found.token_ids[0, :, 0]
    assert (firsts >= 0).all()
    assert ((found.token_ids[:, :, 1] >= 0) == (way == "shared")).all()
    assert commit_one(chains, 1, np.append(firsts[:3], 5).astype(np.int32)) == 3
    assert commit_one(chains, 2, firsts) == 4
    assert len(chains.start([1, 2], 1, 1).collect().token_ids) == 2
    for session_id in (1, 2):
        chains.close(session_id)
    assert other.free_slots == 1024

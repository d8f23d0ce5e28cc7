"""A parallel draft model against plain arithmetic: what a pass says of each place, and which nodes get it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specq.drafting import CONTEXT, DRAFTERS, Expansion
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.making import level_times
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.interface import NodeChains
from specq.drafting.parallel.drafter import WIDTH, ParallelModel
from specq.protocol import EngineError, SamplingParams
from specq.testing import DrafterConformance
from specq.testing.checkpoints_draft import MADE, PARALLEL, VOCAB, draft_logits, make_draft, places_logits
from specq.verification.sampling import perturbed_scores

K = PARALLEL.num_places
SLOTS = 512
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=5)
DRAWN = SamplingParams(temperature=0.9, strategy="probabilistic", seed=5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_draft(tmp_path_factory.mktemp("parallel"), PARALLEL)


@pytest.fixture
def draft(directory):
    return ParallelModel(Contexts(str(directory), device="cpu", kv_slots=SLOTS))


@pytest.fixture
def passes(draft, monkeypatch):
    """The rows of each pass that was run, in a list."""
    found, run = [], draft._contexts.run
    monkeypatch.setattr(draft._contexts, "run", lambda rows: found.append(rows.num_rows) or run(rows))
    return found


class Text:
    """A test's own book of one session: the context, and of each node its path and which pass foresaw its children, at
    which place."""

    def __init__(self, draft, directory, context, params=GREEDY, session_id=1):
        self.draft, self.directory, self.session_id, self.params = draft, directory, session_id, params
        self.context = list(context)
        self.paths, self.lines, self.sources = {CONTEXT: []}, {CONTEXT: []}, {}
        self.next_id = 0
        draft.open(session_id, np.array(context, np.int32), params)

    def request(self, node, fan_out=3):
        self.next_id += fan_out
        return Expansion(self.session_id, node, tuple(range(self.next_id - fan_out, self.next_id)))

    def expected(self, node, fan_out):
        """The best tokens and their scores, by the pass that foresaw them."""
        text = self.context + self.paths[node]
        if node not in self.sources:
            self.sources[node] = places_logits(self.directory, text, K), 0
        logits, place = self.sources[node]
        params = GREEDY if self.params.strategy == "probabilistic" else self.params
        scores = perturbed_scores(logits[place : place + 1], [params], [len(text)])[0]
        top = scores.topk(fan_out)
        return top.indices.tolist(), torch.log_softmax(scores, -1)[top.indices].tolist()

    def check(self, request, children):
        fan_out = len(request.child_ids)
        tokens, scores = self.expected(request.node_id, fan_out)
        assert children.token_ids.tolist() == tokens
        np.testing.assert_allclose(children.scores, scores, atol=2e-3)
        assert children.distribution is None
        logits, place = self.sources[request.node_id]
        for child, token in zip(request.child_ids, tokens, strict=True):
            self.paths[child] = [*self.paths[request.node_id], token]
            self.lines[child] = [*self.lines[request.node_id], child]
            if place + 1 < K:
                self.sources[child] = logits, place + 1

    def expand(self, *nodes, fan_out=3):
        requests = [self.request(node, fan_out) for node in nodes]
        for request, children in zip(requests, self.draft.expand(requests), strict=True):
            self.check(request, children)
        return [list(request.child_ids) for request in requests]

    def commit(self, node, *more):
        tokens, line = [*self.paths[node], *more], self.lines[node]
        self.draft.commit(self.session_id, np.array(tokens, np.int32), line)
        self.context += tokens
        depth = len(line)
        kept = [n for n, own in self.lines.items() if own[:depth] == line and not more and len(own) > depth]
        self.paths = {CONTEXT: []} | {n: self.paths[n][depth:] for n in kept}
        self.lines = {CONTEXT: []} | {n: self.lines[n][depth:] for n in kept}
        self.sources = {n: self.sources[n] for n in kept if n in self.sources}


def contexts(*sizes):
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, size).tolist() for size in sizes]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, DRAWN], ids=["greedy", "sampled", "probabilistic"])
def test_one_pass_says_what_stands_at_each_place(draft, directory, passes, params):
    """The tree below the context needs no second pass down to the last place; the next level gets one, for all its
    nodes."""
    (context,) = contexts(30)
    text = Text(draft, directory, context, params)
    level = [CONTEXT]
    for _ in range(K):
        level = [child for children in text.expand(*level) for child in children[:2]]
    assert passes == [30 + K - 1]

    text.expand(*level[:5])

    inner = {node for leaf in level[:5] for node in text.lines[leaf]}
    assert passes[1:] == [len(inner) + 5 * (K - 1)]


def test_it_is_right_through_growth_and_commits_of_all_kinds(draft, directory):
    """Three sessions at random: inner nodes, leaves, corrections; nothing of a pass stays behind."""
    rng = np.random.default_rng(0)
    texts = [
        Text(draft, directory, c, p, i)
        for i, (c, p) in enumerate(zip(contexts(3, 18, 40), (GREEDY, SAMPLED, DRAWN), strict=True))
    ]
    done = [set() for _ in texts]
    for _ in range(40):
        pairs = []
        for text, own in zip(texts, done, strict=True):
            chosen = rng.permutation([n for n in text.paths if n not in own])[: rng.integers(0, 5)].tolist()
            own.update(chosen)
            pairs += [(text, text.request(node)) for node in chosen]
        answers = draft.expand([request for _, request in pairs])
        for (text, request), children in zip(pairs, answers, strict=True):
            text.check(request, children)
        for i, text in enumerate(texts):
            if rng.random() < 0.4:
                node = int(rng.choice(list(text.paths)))
                count = int(rng.integers(1, 3)) if node == CONTEXT or rng.random() < 0.4 else 0
                text.commit(node, *rng.integers(0, VOCAB, count).tolist())
                done[i] &= set(text.paths) - {CONTEXT}
    for text in texts:
        draft.close(text.session_id)
    assert draft.free_slots == SLOTS


def test_masks_leave_no_kv_behind(draft, directory):
    text = Text(draft, directory, contexts(30)[0])
    text.expand(CONTEXT)
    assert draft.free_slots == SLOTS - 30


def test_what_was_accepted_is_not_computed_again(draft, directory, passes):
    """Where a pass has read it; else it is read with the next one."""
    text = Text(draft, directory, contexts(30)[0])
    node, line = CONTEXT, []
    for _ in range(K):
        node = text.expand(node)[0][0]
        line.append(node)
    text.expand(node)  # reads all that leads there
    text.commit(line[K - 2])
    text.expand(CONTEXT)
    assert passes == [30 + K - 1, K + K - 1, 1 + K - 1]
    text.commit(CONTEXT, 7, 8)
    text.expand(CONTEXT)
    assert passes[3] == 2 + K - 1


def test_more_children_than_are_kept_are_given_when_they_are_asked_for(draft, directory):
    text = Text(draft, directory, contexts(12)[0])
    text.expand(CONTEXT, fan_out=WIDTH + 3)


def test_drafts_stop_at_the_maximum_length(tmp_path):
    directory = make_draft(tmp_path, replace(PARALLEL, max_position_embeddings=32))
    draft = ParallelModel(Contexts(str(directory), device="cpu", kv_slots=SLOTS))
    text, node = Text(draft, directory, contexts(30)[0]), CONTEXT
    for _ in range(2):
        node = text.expand(node)[0][0]
    (beyond,) = draft.expand([text.request(node)])
    assert len(beyond.token_ids) == 0


def test_without_room_no_state_changes_and_with_room_it_continues(draft, directory):
    text = Text(draft, directory, contexts(30)[0])
    (level,) = text.expand(CONTEXT)
    held = draft._pool.take(draft.free_slots - 3)
    text.commit(level[0])
    with pytest.raises(EngineError, match="KV slots are needed"):
        draft.expand([text.request(CONTEXT)])
    assert draft.free_slots == 3
    draft._pool.give(held)
    text.expand(CONTEXT)


def test_a_failed_pass_changes_no_state(draft, directory, monkeypatch):
    text = Text(draft, directory, contexts(30)[0])
    free = draft.free_slots
    with monkeypatch.context() as patched:
        patched.setattr(draft._contexts, "run", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draft.expand([text.request(CONTEXT)])
    assert draft.free_slots == free
    text.expand(CONTEXT)


def test_an_unknown_node_is_refused(draft, directory):
    text = Text(draft, directory, contexts(5)[0])
    with pytest.raises(EngineError, match="draft node 77 is unknown or was removed"):
        draft.expand([text.request(77)])


def test_the_table_takes_the_form_from_the_checkpoint(directory, tmp_path):
    make = DRAFTERS.resolve("draft-model").make
    assert isinstance(make(str(directory), device="cpu", kv_slots=64), ParallelModel)
    assert not isinstance(make(str(make_draft(tmp_path, MADE)), device="cpu", kv_slots=64), ParallelModel)


def test_its_chains_take_one_pass(draft, directory, passes):
    """As a colocated drafter uses it: a chain of first choices, each by its own place."""
    (context,) = contexts(20)
    source = NodeChains(draft)
    source.open(1, np.array(context, np.int32), GREEDY)
    pending = source.start([1], K, 1)
    expected = places_logits(directory, context, K).argmax(-1).tolist()
    assert pending.collect().token_ids[0, :, 0].tolist() == expected
    assert passes == [20 + K - 1]
    assert source.commit([1], np.array([2]), np.array(expected[:2], np.int32)).tolist() == [2]


def test_a_pass_is_timed_and_not_what_an_earlier_one_foresaw(draft, passes):
    """Each of the drafts that are timed runs a pass: a context that is as it was would need none."""
    timed = []
    source = NodeChains(draft)
    start = source.start
    source.start = lambda *asked: timed.append(len(passes)) or start(*asked)
    assert min(level_times(source, [1, 2], K, {1})) > 0
    assert len(timed) > 2
    assert [*timed[1:], len(passes)] == [before + 1 for before in timed]


def test_a_place_of_its_own_is_worth_more_than_a_foreseen_one(draft, directory):
    """After a commit the context is read again: its first place is what the model says without masks."""
    text = Text(draft, directory, contexts(20)[0])
    ((first, *_),) = text.expand(CONTEXT)
    text.commit(first)
    (children,) = draft.expand([text.request(CONTEXT, 1)])
    assert children.token_ids.tolist() == [int(draft_logits(directory, text.context).argmax())]


class TestConformance(DrafterConformance):
    """All that any drafter must do."""

    foresees = True

    @pytest.fixture
    def drafter(self, directory):
        return draft_trees(Contexts(str(directory), device="cpu"))

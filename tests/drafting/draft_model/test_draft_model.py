"""The draft model against plain transformers: what it says of a node does not depend on how the node came to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.drafting import Children, Expansion
from specq.drafting.draft_model import contexts as module
from specq.drafting.draft_model.drafter import DraftModel
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, random_tokens, reference_logits
from specq.verification.drafting import truncated_distributions
from specq.verification.sampling import perturbed_scores

SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=5)


@pytest.fixture(params=["llama", "llama-bf16", "opt", "qwen3"])
def directory(request, tmp_path):
    return make_checkpoint(request.param, tmp_path)


@pytest.fixture
def draft(tmp_path) -> DraftModel:
    return DraftModel(str(make_checkpoint("llama", tmp_path)), device="cpu", kv_slots=256)


class Tree:
    """A test's own book of one session: what was committed, and the tokens of each node."""

    def __init__(self, draft: DraftModel, context: list[int], params: SamplingParams, session_id: int = 1) -> None:
        self.draft, self.context, self.params, self.session_id = draft, context, params, session_id
        self.paths: dict[int, list[int]] = {-1: []}
        self.line: dict[int, list[int]] = {-1: []}
        self.next_id = 0
        draft.open(session_id, np.array(context, np.int32), params)

    def requests(self, nodes: list[int], fan_out: int = 3) -> list[Expansion]:
        made = []
        for node in nodes:
            made.append(Expansion(self.session_id, node, tuple(range(self.next_id, self.next_id + fan_out))))
            self.next_id += fan_out
        return made

    def note(self, request: Expansion, children: Children) -> None:
        for child, token in zip(request.child_ids, children.token_ids.tolist(), strict=False):
            self.paths[child] = [*self.paths[request.node_id], token]
            self.line[child] = [*self.line[request.node_id], child]

    def expand(self, nodes: list[int], fan_out: int = 3) -> list[Children]:
        requests = self.requests(nodes, fan_out)
        answers = self.draft.expand(requests)
        for request, children in zip(requests, answers, strict=True):
            self.note(request, children)
        return answers

    def commit(self, node: int, *more: int) -> None:
        """Commit the path to a node and then other tokens."""
        tokens, line = [*self.paths[node], *more], self.line[node]
        self.draft.commit(self.session_id, np.array(tokens, np.int32), line)
        self.context += tokens
        depth = len(line)
        kept = {n for n, own in self.line.items() if own[:depth] == line and not more and len(own) > depth}
        self.paths = {-1: []} | {n: self.paths[n][depth:] for n in kept}
        self.line = {-1: []} | {n: self.line[n][depth:] for n in kept}

    def expected(self, reference, node: int, fan_out: int) -> tuple[list[int], list[float]]:
        text = self.context + self.paths[node]
        scores = perturbed_scores(reference_logits(reference, text)[None], [self.params], [len(text)])[0]
        top = scores.topk(fan_out)
        return top.indices.tolist(), torch.log_softmax(scores, -1)[top.indices].tolist()


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_children_are_the_best_perturbed_scores_through_commits_of_all_kinds(directory, params):
    """Random growth and re-rooting: inner nodes, leaves, corrections; each answer equals a plain forward's."""
    rng = np.random.default_rng(0)
    draft, reference = DraftModel(str(directory), device="cpu", kv_slots=1024), load_reference(directory)
    trees = [Tree(draft, random_tokens(rng, length).tolist(), params, i) for i, length in enumerate((3, 18, 40))]
    expanded: list[set[int]] = [set(), set(), set()]
    for _ in range(25):
        requests, owners = [], []
        for tree, done in zip(trees, expanded, strict=True):
            open_nodes = [node for node in tree.paths if node not in done]
            chosen = rng.permutation(open_nodes)[: rng.integers(0, 5)].tolist()
            done.update(chosen)
            requests += tree.requests(chosen)
            owners += [tree] * len(chosen)
        for tree, request, children in zip(owners, requests, draft.expand(requests), strict=True):
            tree.note(request, children)
            tokens, scores = tree.expected(reference, request.node_id, 3)
            assert children.token_ids.tolist() == tokens
            np.testing.assert_allclose(children.scores, scores, atol=1e-3)
        for i, tree in enumerate(trees):
            if rng.random() < 0.4:
                node = int(rng.choice(list(tree.paths)))
                more = random_tokens(rng, int(rng.integers(1, 3)) if node == -1 or rng.random() < 0.5 else 0).tolist()
                was_expanded = node in expanded[i] and not more
                tree.commit(node, *more)
                expanded[i] = {n for n in expanded[i] if n in tree.paths and n != -1} | (
                    {-1} if was_expanded else set()
                )
    for tree in trees:
        draft.close(tree.session_id)
    assert draft.free_slots == 1024


def test_the_first_child_is_what_the_same_model_would_commit(draft):
    """A drafter as good as its target is always right, under sampling too."""
    tree = Tree(draft, [1, 2, 3], SAMPLED)
    (children,) = tree.expand([-1], fan_out=5)
    assert len(children.token_ids) == 5
    assert sorted(children.scores.tolist(), reverse=True) == children.scores.tolist()


def test_scores_are_log_probabilities(draft):
    (children,) = Tree(draft, [1, 2, 3], SamplingParams()).expand([-1], fan_out=VOCAB)
    assert np.exp(children.scores).sum() == pytest.approx(1, abs=1e-4)


def test_tokens_that_the_sampler_excludes_are_not_children(draft):
    (children,) = Tree(draft, [1, 2, 3], SamplingParams(temperature=1.0, top_k=2)).expand([-1], fan_out=5)
    assert len(children.token_ids) == 2
    assert np.isfinite(children.scores).all()


def test_no_child_lies_beyond_the_targets_vocabulary(draft):
    draft.limit_vocab = 7
    (children,) = Tree(draft, [1, 2, 3], SamplingParams()).expand([-1], fan_out=20)
    assert sorted(children.token_ids.tolist()) == list(range(7))


def test_tokens_that_the_model_cannot_embed_do_no_harm(draft):
    tree = Tree(draft, [1, 2, VOCAB + 5000], SamplingParams())
    tree.expand([-1])
    draft.commit(1, np.array([VOCAB + 1], np.int32), [])
    assert len(tree.expand([-1])[0].token_ids) == 3


def test_a_long_context_is_computed_in_chunks(draft, monkeypatch):
    context = random_tokens(np.random.default_rng(1), 90).tolist()
    (whole,) = Tree(draft, list(context), SamplingParams(), session_id=1).expand([-1])
    draft.close(1)
    draft._pool.take(256)  # nothing cached survives
    draft._pool.give(np.arange(256, dtype=np.int32))
    monkeypatch.setattr(module, "MAX_PREFILL_ROWS", 32)
    (chunked,) = Tree(draft, list(context), SamplingParams(), session_id=2).expand([-1])
    assert whole.token_ids.tolist() == chunked.token_ids.tolist()


def test_contexts_of_many_sessions_are_computed_in_shared_chunks(draft, monkeypatch):
    """What each says is what it says alone, and no pass is larger than allowed but for the nodes."""
    rng = np.random.default_rng(3)
    contexts = [random_tokens(rng, length).tolist() for length in (30, 1, 44, 17)]
    alone = []
    for context in contexts:
        alone.append(Tree(draft, list(context), SamplingParams()).expand([-1])[0].token_ids.tolist())
        draft.close(1)
    draft._pool.take(256)  # nothing cached survives
    draft._pool.give(np.arange(256, dtype=np.int32))
    sizes, forward = [], draft._contexts._forward
    monkeypatch.setattr(draft._contexts, "_forward", lambda rows: sizes.append(rows.num_rows) or forward(rows))
    monkeypatch.setattr(module, "MAX_PREFILL_ROWS", 16)
    trees = [Tree(draft, list(context), SamplingParams(), session_id=i) for i, context in enumerate(contexts)]
    together = draft.expand([request for tree in trees for request in tree.requests([-1])])
    assert [children.token_ids.tolist() for children in together] == alone
    assert max(sizes) <= 16
    assert sum(sizes) == sum(map(len, contexts))


def test_drafts_stop_at_the_maximum_length(directory):
    draft = DraftModel(str(directory), device="cpu", kv_slots=1024)
    tree = Tree(draft, random_tokens(np.random.default_rng(2), 598).tolist(), SamplingParams())
    (children,) = tree.expand([-1])
    (last,) = tree.expand([0])
    assert len(children.token_ids) == len(last.token_ids) == 3
    (beyond,) = tree.expand([3])
    assert len(beyond.token_ids) == 0


def test_without_room_no_state_changes_and_with_room_it_continues(draft):
    tree = Tree(draft, list(range(50)), SamplingParams())
    tree.expand([-1], fan_out=90)
    held = draft._pool.take(draft.free_slots - 10)
    with pytest.raises(EngineError, match="KV slots are needed"):
        tree.draft.expand(tree.requests(list(range(20))))
    assert draft.free_slots == 10
    draft._pool.give(held)
    tree.expand(list(range(20)))
    draft.close(1)
    assert draft.free_slots == 256


def test_a_failed_forward_pass_changes_no_state(draft):
    tree = Tree(draft, list(range(50)), SamplingParams())
    forward, free = draft._contexts._forward, draft.free_slots

    def fail(rows):
        raise RuntimeError("out of memory")

    draft._contexts._forward = fail
    with pytest.raises(RuntimeError):
        draft.expand([Expansion(1, -1, (900,))])
    assert draft.free_slots == free
    draft._contexts._forward = forward
    assert len(tree.expand([-1])[0].token_ids) == 3


def test_a_node_that_was_cut_is_an_error(draft):
    tree = Tree(draft, [1, 2, 3], SamplingParams())
    tree.expand([-1])
    tree.commit(0)
    with pytest.raises(EngineError, match="draft node 1 is unknown or was removed"):
        draft.expand([Expansion(1, 1, (50,))])


WARM = SamplingParams(temperature=0.8, top_p=0.9, strategy="probabilistic")


def test_drawn_children_come_from_the_distribution_that_travels(tmp_path):
    """The distribution is the truncated one of a plain forward, and it is what the children are drawn from."""
    directory = make_checkpoint("llama", tmp_path)
    draft, context = (
        DraftModel(str(directory), device="cpu", distribution_size=6),
        random_tokens(np.random.default_rng(0), 9).tolist(),
    )
    tree = Tree(draft, context, WARM)
    counts = np.zeros(VOCAB)
    for _ in range(600):
        (children,) = tree.expand([-1], 1)
        counts[children.token_ids[0]] += 1
    logits = reference_logits(load_reference(directory), context)[None]
    ids, weights = truncated_distributions(logits, [WARM], 6)
    assert children.distribution is not None
    assert children.distribution.ids.tolist() == ids[0].tolist()
    assert np.abs(children.distribution.weights.astype(int) - weights[0].astype(int)).max() <= 2
    distribution = np.zeros(VOCAB)
    distribution[ids[0][weights[0] > 0]] = weights[0][weights[0] > 0] / weights[0].sum()
    assert np.abs(counts / 600 - distribution).max() < 0.1
    assert counts[distribution == 0].sum() == 0


def test_drawn_and_ranked_children_mix_in_a_pass(tmp_path):
    """Each session as its strategy asks; at temperature 0 nothing is drawn."""
    directory = make_checkpoint("llama", tmp_path)
    draft, context = DraftModel(str(directory), device="cpu"), random_tokens(np.random.default_rng(0), 9).tolist()
    cold = SamplingParams(strategy="probabilistic")
    trees = [Tree(draft, context, params, i) for i, params in enumerate((WARM, SAMPLED, cold), 1)]
    requests = [tree.requests([-1])[0] for tree in trees]
    drawn, ranked, greedy = draft.expand(requests)
    assert drawn.distribution is not None
    assert set(drawn.token_ids.tolist()) <= set(drawn.distribution.ids.tolist())
    assert ranked.distribution is greedy.distribution is None
    reference = load_reference(directory)
    assert ranked.token_ids.tolist() == trees[1].expected(reference, -1, 3)[0]
    assert greedy.token_ids.tolist() == trees[2].expected(reference, -1, 3)[0]
    trees[0].note(requests[0], drawn)
    (deeper,) = trees[0].expand([int(requests[0].child_ids[0])])
    assert len(deeper.token_ids) == 3

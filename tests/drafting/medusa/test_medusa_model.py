"""A draft model that decodes with Medusa heads: its drafts are what the model says without them, in fewer passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.config import DraftConfig
from specq.drafting import CONTEXT, DRAFTERS, Expansion, Pending
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.drafter import DraftModel
from specq.drafting.medusa import draft_model as module
from specq.drafting.medusa.draft_model import MedusaModel
from specq.drafting.medusa.drafter import Medusa
from specq.drafting.medusa.network import load_heads
from specq.drafting.trees.ranked import Ranked
from specq.drafting.vocabulary import in_vocabulary
from specq.processes.draft import build_worker
from specq.protocol import ConfigError, EngineError, SamplingParams
from specq.testing import DrafterConformance
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, random_tokens, reference_text
from specq.testing.checkpoints_draft import MADE, make_draft
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import change_heads, make_published
from tests.drafting.draft_model.test_draft_model import Tree
from tests.drafting.vocabulary.drafts import BOTH, INFO, TEXT

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=5)
DRAWN = SamplingParams(temperature=0.9, strategy="probabilistic", seed=5)
SLOTS = 2048


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directory(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return make_published(tmp_path_factory.mktemp("heads"), 40, VOCAB, heads=1)


def make(directory, heads, kv_slots=SLOTS, **options) -> MedusaModel:
    contexts = Contexts(str(directory), device="cpu", kv_slots=kv_slots)
    return MedusaModel(contexts, Medusa(load_heads(str(heads), str(directory), contexts.info, "cpu"), VOCAB), **options)


@pytest.fixture
def draft(directory, heads):
    return make(directory, heads)


@pytest.fixture
def guesses_all(monkeypatch):
    """Every token is guessed below each node, as random heads would hardly guess one that is right."""
    monkeypatch.setattr(module, "RANKS", VOCAB)
    monkeypatch.setattr(module, "MOST_GUESSES", 15 * VOCAB)
    monkeypatch.setattr(module, "LEAST_CHANCE", 1e-30)


def passes_of(draft, monkeypatch) -> list[int]:
    """The rows of each pass that is run from now on, in a list."""
    found, run = [], draft._contexts.run_with_states
    monkeypatch.setattr(draft._contexts, "run_with_states", lambda rows: found.append(rows.num_rows) or run(rows))
    return found


def grown(draft, context, params, num_rounds=30, seed=0):
    """Grow and re-root three sessions at random: inner nodes, leaves, corrections; return all that was answered."""
    rng, said = np.random.default_rng(seed), []
    trees = [Tree(draft, context[: 5 + 12 * i], params, i) for i in range(3)]
    expanded: list[set[int]] = [set() for _ in trees]
    for _ in range(num_rounds):
        requests, owners = [], []
        for tree, done in zip(trees, expanded, strict=True):
            chosen = rng.permutation([node for node in tree.paths if node not in done])[: rng.integers(0, 4)].tolist()
            done.update(chosen)
            requests += tree.requests(sorted(chosen))  # a draft model draws in this order
            owners += [tree] * len(chosen)
        for tree, request, children in zip(owners, requests, draft.expand(requests), strict=True):
            tree.note(request, children)
            said.append((tree, tree.context + tree.paths[request.node_id], children))
        for tree, done in zip(trees, expanded, strict=True):
            if rng.random() < 0.4:
                node = int(rng.choice(list(tree.paths)))
                more = random_tokens(rng, int(rng.integers(1, 3)) if node == -1 or rng.random() < 0.5 else 0).tolist()
                was_expanded = node in done and not more
                tree.commit(node, *more)
                done.intersection_update(set(tree.paths) - {CONTEXT})
                done.update({CONTEXT} if was_expanded else set())
    for tree in trees:
        draft.close(tree.session_id)
    return said


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, DRAWN], ids=["greedy", "sampled", "probabilistic"])
@pytest.mark.parametrize("kind", ["all", "likely"])
def test_its_drafts_are_those_of_the_model_without_heads(directory, heads, params, kind, request, monkeypatch):
    """Through growth and commits of all kinds, whatever was guessed; drawn ones with their distributions, by the same
    draws. Nothing is left of what was guessed wrongly."""
    if kind == "all":
        request.getfixturevalue("guesses_all")
    context = random_tokens(np.random.default_rng(3), 40).tolist()
    plain = DraftModel(str(directory), device="cpu", kv_slots=SLOTS, rng=np.random.default_rng(7))
    draft = make(directory, heads, rng=np.random.default_rng(7))
    asked, compute = [], draft._compute
    monkeypatch.setattr(draft, "_compute", lambda nodes: asked.extend(nodes.values()) or compute(nodes))

    expected, found = grown(plain, context, params), grown(draft, context, params)

    assert len(expected) == len(found) > 40
    for (_, text, children), (_, own_text, own) in zip(expected, found, strict=True):
        assert own_text == text
        assert own.token_ids.tolist() == children.token_ids.tolist()
        np.testing.assert_allclose(own.scores, children.scores, atol=1e-3)
        assert (own.distribution is None) == (params is not DRAWN)
        if own.distribution is not None:
            assert own.distribution.ids.tolist() == children.distribution.ids.tolist()
            np.testing.assert_allclose(
                own.distribution.weights.astype(float), children.distribution.weights.astype(float), atol=2
            )
    assert draft.free_slots == SLOTS
    num_asked = sum(map(len, asked))
    assert num_asked < len(found) if kind == "all" else num_asked <= len(found)


@pytest.mark.parametrize("way", ["shared", "text"])
def test_it_drafts_for_targets_of_another_vocabulary(directory, heads, way, guesses_all):
    """As the model without heads does: its text is cut anew where the target's goes on otherwise, which takes tokens
    back."""
    found = []
    for make_one in (
        lambda: DraftModel(str(directory), device="cpu", kv_slots=SLOTS),
        lambda: make(directory, heads),
    ):
        draft = make_one()
        said = grown(in_vocabulary(draft, way, BOTH, INFO), TEXT * 3, GREEDY, num_rounds=15)
        found.append([(text, children.token_ids.tolist()) for _, text, children in said])
        assert draft.free_slots == SLOTS
    assert found[0] == found[1]
    assert sum(bool(tokens) for _, tokens in found[0]) > 10


class Seer:
    """Heads that know by the state which row of a greedy text they are asked from, and what comes there, but for some
    places. Fulfils `HeadSource`."""

    num_heads = 3

    def __init__(self, directory, context, length, wrong=()):
        reference = load_reference(directory)
        self.text = [*context, *reference_text(reference, [*context], length)]
        with torch.inference_mode():
            self._states = reference.model(torch.tensor([self.text])).last_hidden_state[0]
        self._wrong = wrong

    def start(self, states, params, lengths, count):
        token_ids = np.zeros((len(states), self.num_heads, count), np.int32)
        scores = np.full(token_ids.shape, -20, np.float32)
        scores[:, :, 0] = -0.1
        for i, (state, length) in enumerate(zip(states, lengths, strict=True)):
            distances = (self._states - torch.as_tensor(state.values[state.row])).abs().amax(1)
            row = int(distances.argmin())
            assert distances[row] < 1e-2
            assert row == length - 2  # the row before the one whose token the guesses follow
            for head, place in enumerate(range(length, min(length + self.num_heads, len(self.text)))):
                token_ids[i, head, 0] = (self.text[place] + (place in self._wrong)) % VOCAB
        return Pending(lambda: Ranked(token_ids, scores))


CHAIN_CONTEXT = (3, 14, 15, 92, 65)


def test_its_chain_is_what_the_model_says(directory, monkeypatch):
    """Greedily, token for token; heads that are right bring four tokens a pass."""
    seer = Seer(directory, CHAIN_CONTEXT, 40)
    draft = MedusaModel(Contexts(str(directory), device="cpu", kv_slots=SLOTS), seer)
    passes = passes_of(draft, monkeypatch)
    tree, node, chain = Tree(draft, [*CHAIN_CONTEXT], GREEDY), CONTEXT, []
    for _ in range(13):
        (request,) = tree.requests([node], 1)
        (children,) = draft.expand([request])
        tree.note(request, children)
        node = request.child_ids[0]
        chain += children.token_ids.tolist()
    assert [*CHAIN_CONTEXT, *chain] == seer.text[: len(CHAIN_CONTEXT) + 13]
    assert passes == [5, 4, 4, 4]


def test_heads_that_are_wrong_cost_passes_and_no_token(directory, monkeypatch):
    """A wrong guess ends what the pass says; round by round, each committed as a whole."""
    seer = Seer(directory, CHAIN_CONTEXT, 40, wrong=(8, 13, 14))
    draft = MedusaModel(Contexts(str(directory), device="cpu", kv_slots=SLOTS), seer)
    passes = passes_of(draft, monkeypatch)
    tree = Tree(draft, [*CHAIN_CONTEXT], GREEDY)
    for _ in range(4):
        node = CONTEXT
        for _ in range(3):
            (request,) = tree.requests([node], 1)
            tree.note(request, draft.expand([request])[0])
            node = request.child_ids[0]
        tree.commit(node)
    assert tree.context == seer.text[: len(CHAIN_CONTEXT) + 12]
    # Places that are known by each pass: 5 | 6 7 8, as the guess for 8 is wrong | 9 10 11 12 | 13 | 14, both guesses
    # being wrong | 15 16 17 18.
    assert passes == [5, 4, 4, 4, 4, 4]
    draft.close(1)
    assert draft.free_slots == SLOTS


def test_behind_a_correction_heads_guess_at_once(draft, guesses_all, monkeypatch):
    """From the state of the last row that was right; so the node below the correction is known with it."""
    tree = Tree(draft, [3, 14, 15], GREEDY)
    (children,) = tree.expand([CONTEXT], 2)
    (after,) = tree.expand([0], 2)
    assert len(after.token_ids) == 2
    wrong = next(token for token in range(VOCAB) if token not in children.token_ids)
    tree.commit(CONTEXT, wrong)
    passes = passes_of(draft, monkeypatch)
    (first,) = tree.requests([CONTEXT], 1)
    tree.note(first, draft.expand([first])[0])
    (below,) = tree.requests([first.child_ids[0]], 1)
    tree.note(below, draft.expand([below])[0])
    assert len(passes) == 1
    assert passes[0] > VOCAB


def test_an_accepted_node_that_is_known_needs_no_pass(draft, guesses_all, monkeypatch):
    """It becomes the context, with all that is known of it."""
    tree = Tree(draft, [3, 14, 15], GREEDY)
    tree.expand([CONTEXT], 1)
    tree.expand([0], 2)
    tree.commit(1)
    passes = passes_of(draft, monkeypatch)
    (children,) = tree.expand([CONTEXT], 3)
    assert (len(children.token_ids), passes) == (3, [])


def test_short_slots_disable_guesses(directory, heads, guesses_all, monkeypatch):
    """Drafts continue. Without any slots no state changes, and drafting continues when there is room."""
    draft = make(directory, heads, kv_slots=64)
    tree = Tree(draft, [3, 14, 15], GREEDY)
    tree.expand([CONTEXT], 2)
    passes = passes_of(draft, monkeypatch)
    tree.expand([0], 2)
    assert passes == [1]
    held = draft._pool.take(draft.free_slots)
    with pytest.raises(EngineError, match="KV slots are needed"):
        draft.expand([Expansion(1, 2, (50, 51))])
    draft._pool.give(held)
    (children,) = draft.expand([Expansion(1, 2, (50, 51))])
    assert len(children.token_ids) == 2
    draft.close(1)
    assert draft.free_slots == 64


def test_a_failed_pass_changes_no_state(draft, guesses_all, monkeypatch):
    tree = Tree(draft, [3, 14, 15], GREEDY)
    tree.expand([CONTEXT], 2)
    free = draft.free_slots
    with monkeypatch.context() as patched:
        patched.setattr(draft._contexts, "run_with_states", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draft.expand([Expansion(1, 0, (50,))])
    assert draft.free_slots == free
    assert len(draft.expand([Expansion(1, 0, (50,))])[0].token_ids) == 1


def test_drafts_and_guesses_stop_at_the_maximum_length(directory, heads, guesses_all):
    draft = make(directory, heads)
    context = random_tokens(np.random.default_rng(0), draft.info.max_length - 2).tolist()
    tree, node = Tree(draft, context, GREEDY), CONTEXT
    for expected in (1, 1, 0):
        (children,) = tree.expand([node], 1)
        assert len(children.token_ids) == expected
        node = tree.next_id - 1


def test_rewinding_frees_what_was_guessed(draft, guesses_all):
    tree = Tree(draft, [3, 14, 15, 9, 2, 6], GREEDY)
    tree.expand([CONTEXT], 2)
    tree.expand([0], 2)
    draft.rewind(1, 4)
    assert len(draft.expand([Expansion(1, CONTEXT, (90,))])[0].token_ids) == 1
    draft.close(1)
    assert draft.free_slots == SLOTS


class TestConformance(DrafterConformance):
    """All that any drafter must do."""

    @pytest.fixture(params=["likely", "all"])
    def drafter(self, request, directory, heads):
        if request.param == "all":
            request.getfixturevalue("guesses_all")
        return make(directory, heads)


# --- from a configuration
# -------------------------------------------------------------------------------------------------


def test_the_table_makes_it_of_a_directory_of_heads(directory, heads):
    made = DRAFTERS.resolve("draft-model").make(str(directory), device="cpu", kv_slots=64, heads=str(heads))
    assert isinstance(made, MedusaModel)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("missing", "the directory .* of Medusa heads does not exist"),
        ("another size", "take hidden states of size 48; those of .* have 40"),
        ("eagle", "contains an EAGLE-3 head; a draft model needs Medusa heads of its own"),
        ("another target", "trained together with another target"),
        ("own form", "is a draft model of specq's own form, for which there are no heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path, kind, match):
    model, place = make_checkpoint("llama", tmp_path / "model"), tmp_path / "heads"
    if kind == "another size":
        make_published(place, 48, VOCAB)
    elif kind == "eagle":
        make_eagle(place, eagle_shape_of(40, VOCAB, 50, layers=(0, 1, 2)))
    elif kind == "another target":
        make_published(place, 40, VOCAB)
        about = {"hidden_size": 40, "num_tokens": VOCAB, "tokenizer_hash": "a" * 64, "target_fingerprint": "b" * 64}
        change_heads(place, model_type="specq-medusa", **about)
    elif kind == "own form":
        model = make_draft(tmp_path / "own", MADE)
        make_published(place, 40, VOCAB)
    with pytest.raises(ConfigError, match=match if kind != "another target" else f"{match}|another tokenizer"):
        DRAFTERS.resolve("draft-model").make(str(model), device="cpu", kv_slots=64, heads=str(place))


def test_a_proposer_without_heads_refuses_them(heads):
    with pytest.raises(ConfigError, match="the proposer ngram does not support heads; use draft-model"):
        build_worker(DraftConfig(proposer="ngram", heads=str(heads)))


def test_random_heads_hardly_cost_more_rows_than_are_allowed(draft, monkeypatch):
    """Of what they think likely at most MOST_GUESSES rows are computed in a pass."""
    passes = passes_of(draft, monkeypatch)
    tree = Tree(draft, [3, 14, 15], GREEDY)
    tree.expand([CONTEXT])
    tree.expand([0, 1, 2])
    assert passes[1] <= 3 + module.MOST_GUESSES
    assert torch.is_grad_enabled()

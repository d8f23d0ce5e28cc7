"""`judge` under `deterministic`: the oracle's paths and tokens, and text that no drafter can change."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.errors import ConfigError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep
from specq.testing import oracle
from specq.testing.random_steps import packed_logits, split, steps
from specq.verification.judge import judge
from specq.verification.strategies import deterministic
from tests.each import each
from tests.verification.steps import said, tree_of


@pytest.mark.usefixtures("way")
@given(st.lists(steps(), max_size=5), st.integers(0, 2**32), st.booleans(), st.booleans())
def test_judge_is_the_oracle(batch, entropy, coarse, as_many):
    """Whether there are so few steps that paths are walked one by one, or as many as are walked at once."""
    logits = packed_logits(batch, entropy, coarse=coarse)
    expected = [(step.session_id, *oracle.deterministic(step, rows)) for step, rows in split(batch, logits)]
    with patch.object(deterministic, "MANY", 0 if as_many else 99):
        judgements = judge(batch, logits)
    assert expected == [(j.session_id, j.path, j.token_ids.tolist()) for j in judgements]
    assert all(j.token_ids.dtype == np.int32 for j in judgements)


@each("count", [1, deterministic.MANY])
def test_of_equal_siblings_the_first_counts(count):
    own = np.array([0], np.int32), SamplingParams(), tree_of([3, 3, 1], [-1, -1, 0])
    steps = [SessionStep(i, 0, *own) for i in range(count)]
    assert said(judge(steps, torch.eye(4)[[3, 1, 0, 2] * count])) == [((0, 2), [3, 1, 2])] * count


def test_an_unknown_strategy_lists_the_known():
    step = SessionStep(1, 0, np.array([0], np.int32), SamplingParams(strategy="nonsense"))
    with pytest.raises(ConfigError, match=r"'nonsense'; known: .*deterministic"):
        judge([step], torch.zeros(1, 4))


def test_no_judged_step_gives_no_judgement():
    prefill = SessionStep(1, 0, np.array([0, 1], np.int32), SamplingParams(), judged=False)
    assert not judge([prefill], torch.zeros(0, 4))


VOCAB = 30


def toy_logits(context):
    """f32[vocab] of a toy target that remembers its last three tokens."""
    return np.random.default_rng([9, *context[-3:]]).normal(0, 2, VOCAB).astype(np.float32)


def no_drafts(context, rng):
    return NO_TREE


def clairvoyant(context, rng):
    """Chains of what the target itself says at the likeliest, sometimes wrong: some nodes are accepted, some not."""
    tokens, now = [], list(context)
    for _ in range(4):
        tokens.append(int(rng.integers(VOCAB)) if rng.random() < 0.2 else int(np.argmax(toy_logits(now))))
        now.append(tokens[-1])
    return tree_of(tokens)


def bushy(context, rng):
    """All tokens below the context, and a random half of them below each of the first four."""
    parents, tokens = [-1] * VOCAB, list(range(VOCAB))
    for node in range(4):
        children = rng.choice(VOCAB, VOCAB // 2, replace=False).tolist()
        tokens += children
        parents += [node] * len(children)
    return tree_of(tokens, parents)


def generate(drafters, params, num_tokens=60):
    """Run one session per drafter in one batch; return texts and the numbers of accepted and rejected nodes."""
    rng = np.random.default_rng(5)
    contexts = [[1, 2, 3] for _ in drafters]
    accepted, rejected = [0] * len(drafters), [0] * len(drafters)
    while min(map(len, contexts)) < num_tokens:
        batch, rows = [], []
        for i, (drafter, context) in enumerate(zip(drafters, contexts, strict=True)):
            tree = drafter(context, rng)
            batch.append(SessionStep(i, len(context) - 1, np.array(context[-1:], np.int32), params, tree))
            branches = [context]
            for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
                branches.append([*branches[parent + 1], token])
            rows += [toy_logits(branch) for branch in branches]
        for i, judgement in enumerate(judge(batch, torch.from_numpy(np.array(rows)))):
            contexts[i] += judgement.token_ids.tolist()
            accepted[i] += len(judgement.path)
            rejected[i] += batch[i].tree.num_nodes - len(judgement.path)
    return [context[:num_tokens] for context in contexts], accepted, rejected


@each(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=7),
        SamplingParams(temperature=1.2, top_p=0.9, seed=8),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.05, seed=9),
    ],
)
def test_no_drafter_changes_the_text(params):
    drafters = (no_drafts, clairvoyant, bushy, clairvoyant)
    texts, accepted, rejected = generate(drafters, params)
    assert texts[0] == generate((no_drafts,), params)[0][0]
    assert texts[1:] == texts[:1] * 3
    assert accepted[0] == 0
    assert min(accepted[1:]) > 0
    assert min(rejected[1:]) > 0


def test_the_seed_changes_the_text():
    texts = [generate((no_drafts,), SamplingParams(temperature=0.8, seed=seed))[0][0] for seed in (1, 2)]
    assert texts[0] != texts[1]

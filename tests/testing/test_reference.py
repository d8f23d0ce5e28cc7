"""The reference decoder: what drafts change of a text, by the rule of each strategy."""

import numpy as np
import pytest

from specq.protocol import SamplingParams, Tree
from specq.testing import oracle
from specq.testing.reference import decode, plain

VOCAB = 8
RULES = ("deterministic", "probabilistic", "greedy")


def target(text):
    """Return logits that depend on the last three tokens."""
    return np.random.default_rng([7, *text[-3:]]).normal(0, 2, VOCAB).astype(np.float32)


def guesses(text):
    """Draft two chains: the likeliest tokens, and others."""
    first = int(target(text).argmax())
    second = int(target([*text, first]).argmax())
    token_ids, parents = [first, second, (first + 1) % VOCAB], [-1, 0, -1]
    return Tree(np.array(token_ids, np.int32), np.array(parents, np.int32), np.zeros(3, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_shorten_the_work_and_leave_the_text(temperature):
    params = SamplingParams(temperature=temperature, seed=5)
    alone, drafted = (decode(target, draft, [1, 2], 40, params) for draft in (plain, guesses))
    assert drafted.token_ids == alone.token_ids
    assert alone.accepted == [0] * 40
    assert len(drafted.accepted) < 40
    assert sum(drafted.accepted) + len(drafted.accepted) >= 40


def test_the_target_decides_alone_what_greedy_decoding_says():
    """By plain arithmetic, without any rule."""
    expected = [1, 2]
    for _ in range(12):
        expected.append(int(target(expected).argmax()))
    for rule in RULES:
        said = decode(target, guesses, [1, 2], 12, SamplingParams(strategy=rule)).token_ids
        assert said == expected[2:], rule


def test_a_stop_token_ends_the_text_also_within_a_round():
    full = decode(target, guesses, [1, 2], 40, SamplingParams()).token_ids
    for place in range(8):
        first = full.index(full[place])
        ended = decode(target, guesses, [1, 2], 40, SamplingParams(), stop_ids=full[place : place + 1])
        assert ended.token_ids == full[: first + 1]


def test_a_lossy_rule_takes_what_is_likely_enough():
    """A threshold of 0 accepts each draft, for any own token of the target."""
    params = SamplingParams(strategy="threshold", threshold=0.0)
    drafted = decode(target, guesses, [1, 2], 30, params)
    assert set(drafted.accepted) == {2}
    assert set(oracle.RULES) >= {"threshold", *RULES}

"""What a source's drafts bring, level by level: older rounds fade, changes are noticed, silence says that they may be
better by now."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specq.verifier.models.token_yield import (
    ALL,
    FEWEST_STEPS,
    LEAST_WORTH,
    MEMORIES,
    NO_NODES,
    NUM_LEVELS,
    PRIOR_CHANCE,
    Judged,
    TokenYield,
)

ALIKE = [0.8, 0.8, 0.8, 0.8]


def drawn(rng: np.random.Generator, chances: Sequence[float], num_rounds: int = 1) -> Judged:
    """Return what became of chains in so many rounds, given each level's chance."""
    tried, accepted = np.zeros(NUM_LEVELS), np.zeros(NUM_LEVELS)
    for _ in range(num_rounds):
        for level, chance in enumerate(chances):
            tried[level] += 1
            if rng.random() > chance:
                break
            accepted[level] += 1
    nodes = np.where(np.arange(NUM_LEVELS) < len(chances), float(num_rounds), 0.0)
    return Judged(num_rounds, nodes, tried, accepted)


def learned(num_steps: int, chances: Sequence[float], num_rounds: int = 1, seed: int = 0) -> TokenYield:
    found, rng = TokenYield(), np.random.default_rng(seed)
    for _ in range(num_steps):
        found.learn(drawn(rng, chances, num_rounds))
    return found


def steps_until_seen(found: TokenYield, chances: Sequence[float], num_rounds: int = 1) -> int:
    """Return after how many steps it says that the texts have changed."""
    rng = np.random.default_rng(5)
    return next(i for i in range(1, 400) if found.learn(drawn(rng, chances, num_rounds)))


# --- counts
# -------------------------------------------------------------------------------------------------------------


def test_chances_are_found_by_level() -> None:
    """Each given the one before."""
    chances = [0.9, 0.5, 0.7, 0.3]
    found = learned(40, chances, num_rounds=60).reach()
    assert found[:4] == pytest.approx(np.cumprod(chances), abs=0.05)


def test_before_anything_is_known_tokens_are_likely() -> None:
    assert TokenYield().reach() == pytest.approx(PRIOR_CHANCE ** np.arange(1, NUM_LEVELS + 1))


def test_a_level_that_was_not_seen_is_as_the_others() -> None:
    """What was drafted two levels deep says of the third what is known of the first two."""
    found = learned(400, [0.4, 0.4]).reach()
    assert found[2] / found[1] == pytest.approx(0.4, abs=0.06)


def test_levels_that_were_seen_are_counted() -> None:
    found = learned(50, [0.95, 0.95, 0.95])
    assert found.most == 3
    found.learn(drawn(np.random.default_rng(0), [0.0]))
    assert found.most == 3


def test_a_round_without_a_draft_yields_no_accepted_tokens() -> None:
    """A draft was requested, and no node was verified: the first level was not reached."""
    found = TokenYield()
    for _ in range(100):
        found.learn(Judged(1, NO_NODES, NO_NODES, NO_NODES))
    assert found.reach()[0] < 0.05
    assert found.nodes()[0] < 0.05
    assert found.most == 0


def test_nodes_are_those_of_a_round_with_or_without_a_draft() -> None:
    found, rng = TokenYield(), np.random.default_rng(0)
    for i in range(300):
        found.learn(Judged(1, NO_NODES, NO_NODES, NO_NODES) if i % 4 else drawn(rng, ALIKE))
    assert found.nodes()[:4] == pytest.approx(np.full(4, 0.25), abs=0.05)


def test_a_level_that_was_not_asked_for_is_not_rejected() -> None:
    found, rng = learned(200, ALIKE), np.random.default_rng(1)
    before = found.reach()
    for _ in range(200):
        found.learn(drawn(rng, ALIKE[:2]), depth=2)
    assert found.reach()[3] / found.reach()[1] == pytest.approx(before[3] / before[1], abs=0.1)
    assert found.nodes()[:4] == pytest.approx(np.ones(4), abs=0.05)


def test_older_rounds_fade() -> None:
    """Their total weight is limited, and steps with many rounds count as fewer steps."""
    assert learned(3000, ALIKE).worth == pytest.approx(MEMORIES[ALL], rel=0.02)
    many = learned(100, ALIKE, num_rounds=256)
    assert many.worth == pytest.approx(256 / (1 - np.exp(-1 / FEWEST_STEPS)), rel=0.02)


def test_a_change_that_is_not_evident_is_followed_as_rounds_fade() -> None:
    found, rng = learned(1000, [0.5]), np.random.default_rng(1)
    for _ in range(int(3 * MEMORIES[ALL])):
        found.learn(drawn(rng, [0.62]))
    assert found.reach()[0] == pytest.approx(0.62, abs=0.07)


# --- changes
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.9, 0.4), (0.1, 0.9), (0.2, 0.8)])
@pytest.mark.parametrize("num_rounds", [1, 4])
def test_evident_changes_are_noticed_within_some_rounds(before: float, after: float, num_rounds: int) -> None:
    """Drafts that become worse as those that become better; all rounds but the last ones are forgotten then."""
    found = learned(400, [before] * 4, num_rounds)
    assert steps_until_seen(found, [after] * 4, num_rounds) <= 20 / num_rounds
    rng = np.random.default_rng(2)
    for _ in range(200 // num_rounds):
        found.learn(drawn(rng, [after] * 4, num_rounds))
    assert found.reach()[0] == pytest.approx(after, abs=0.12)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
@pytest.mark.parametrize("num_rounds", [16, 64])
def test_with_many_sessions_all_is_forgotten_within_few_steps(before: float, after: float, num_rounds: int) -> None:
    """Changed or not."""
    found, rng = learned(100, [before] * 4, num_rounds), np.random.default_rng(2)
    for _ in range(400 // num_rounds + int(2 * FEWEST_STEPS)):
        found.learn(drawn(rng, [after] * 4, num_rounds))
    assert found.reach()[0] == pytest.approx(after, abs=0.12)


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_noise_is_seldom_a_change(chance: float) -> None:
    found, rng = TokenYield(), np.random.default_rng(3)
    assert sum(found.learn(drawn(rng, [chance] * 4)) for _ in range(4000)) <= 8


def test_a_change_below_a_tenth_of_the_tokens_is_ignored() -> None:
    """However evident with many rounds: tokens of a round, 1.02 and 1.06."""
    found = learned(400, [0.02], num_rounds=200)
    rng = np.random.default_rng(4)
    assert not any(found.learn(drawn(rng, [0.06], num_rounds=200)) for _ in range(100))


# --- silence
# ------------------------------------------------------------------------------------------------------------


def test_silence_fades_what_counts_are_worth_and_not_what_they_say() -> None:
    found = learned(400, ALIKE)
    reach, worth, variance = found.reach(), found.worth, found.variance
    for _ in range(30):
        found.pass_by()
    assert found.reach().tolist() == reach.tolist()
    assert 0.3 * worth < found.worth < 0.5 * worth
    assert found.variance > 2 * variance
    for _ in range(1000):
        found.pass_by()
    assert found.worth == LEAST_WORTH
    assert found.reach().tolist() == reach.tolist()


def test_what_was_worth_less_stays_so() -> None:
    """An unknown source is silent, too."""
    found = TokenYield()
    found.pass_by()
    assert found.worth == 0.0


def test_after_silence_a_few_rounds_count_more_than_all_before() -> None:
    """What was known before is worth as little as a first guess."""
    found, rng = learned(400, [0.05] * 4), np.random.default_rng(6)
    for _ in range(300):
        found.pass_by()
    for _ in range(8):
        found.learn(drawn(rng, [0.9] * 4))
    assert found.reach()[0] > 0.5
    assert found.worth < 10


def test_more_rounds_say_more() -> None:
    """The variance of what is believed is that of a round by the rounds that counts are worth; it is never nought."""
    assert TokenYield().variance > learned(4, ALIKE).variance > learned(40, ALIKE).variance > 0
    tokens = [drawn(rng, ALIKE).accepted.sum() for rng in [np.random.default_rng(7)] for _ in range(4000)]
    found = learned(2000, ALIKE)
    assert found.variance * (found.worth + 0.5) == pytest.approx(np.var(tokens), rel=0.25)
    assert learned(400, [0.0]).variance > 0

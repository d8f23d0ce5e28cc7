"""The arithmetic of a benchmark: turns to medians, ratios, acceptance, differences, table."""

from dataclasses import replace

import pytest

from bench.agreement import Difference, differences, summary
from bench.figures import HEADER, figures, rates, speculation, table
from bench.scenario import Completion, Settings
from bench.turns import BLOCK, Turn, blocks, blocks_of, measure, rotated, schedule, warm_up
from specq.samples import Prompt

SETTINGS = Settings(datasets=("a", "b"), repeats=2)
PROMPTS = [Prompt(dataset, str(i), (1, 2)) for dataset in "ab" for i in range(7)]
STATS = {"rounds": 2, "draft_tokens": 4, "accepted_tokens": 2, "drafted": 6, "stale": 2}
STATS |= {"accepted_lengths": [1, 0, 1], "positions": [[2, 1], [2, 1]], "draft_bytes": 100, "verdict_bytes": 60}


class Player:
    """Completes every prompt with the same tokens, and notes what it was asked."""

    def __init__(self, name: str, log: list, tokens: int = 4) -> None:
        self.name, self.concurrency, self.log, self.tokens = name, 1, log, tokens

    def run(self, prompts, settings):
        self.log.append((self.name, [prompt.id for prompt in prompts]))
        return [Completion([7] * self.tokens, 5.0, {"rounds": self.tokens}) for _ in prompts]


def turn(name: str, repeat: int, seconds: float, texts: list[list[int]], stats: dict | None = None) -> Turn:
    prompts = tuple(PROMPTS[: len(texts)])
    return Turn(
        name, repeat, prompts, [Completion(text, 5.0 + i, stats or {}) for i, text in enumerate(texts)], seconds
    )


# --- turns --------------------------------------------------------------------------------------------------------


def test_blocks():
    """One session at a time: small blocks of one data set; several: all prompts at once."""
    assert [len(block) for block in blocks(PROMPTS, 1)] == [BLOCK, 2, BLOCK, 2]
    assert all(len({prompt.dataset for prompt in block}) == 1 for block in blocks(PROMPTS, 1))
    assert blocks(PROMPTS, 4) == [tuple(PROMPTS)]


def test_contestants_take_turns_in_rotating_order():
    """Each block is run by each contestant, and no one always begins."""
    players = [Player(name, []) for name in "xyz"]
    plan = [(repeat, block[0], player.name) for repeat, block, player in schedule(players, blocks_of([PROMPTS] * 2, 1))]
    assert len(plan) == 2 * 4 * 3
    rounds = [plan[i : i + 3] for i in range(0, len(plan), 3)]
    assert all(len({(repeat, first) for repeat, first, _ in one}) == 1 for one in rounds)
    assert [one[0][2] for one in rounds] == list("xyzxyzxy")


def test_each_contestant_is_first_in_turn():
    """The rotation loses no contestant and keeps the order."""
    assert [rotated("xyz", number) for number in (0, 1, 5)] == [list("xyz"), list("yzx"), list("zxy")]
    assert rotated([], 3) == []


def test_measure_warms_up_and_takes_the_time():
    """Each contestant runs once unmeasured. A turn lasts from before to after."""
    log, told, ticks = [], [], iter(range(1000))
    players, settings = [Player("x", log), Player("y", log)], replace(SETTINGS, repeats=1)
    warm_up(players, PROMPTS[:3], settings, told.append)
    turns = measure(players, blocks_of([PROMPTS[:3]], 1), settings, told.append, clock=lambda: next(ticks) * 0.5)
    assert log[:2] == [("x", ["0", "1"]), ("y", ["0", "1"])]
    assert [(one.contestant, one.seconds, one.num_tokens) for one in turns] == [("x", 0.5, 12), ("y", 0.5, 12)]
    assert told == [
        *("warming up x", "warming up y", "2 turns: x, y in rotating order"),
        "1/1 a: x 24 tokens/s (1 of 2 turns left, about 0 s)",
        "1/1 a: y 24 tokens/s (0 of 2 turns left, about 0 s)",
    ]


# --- figures ------------------------------------------------------------------------------------------------------


def test_rates_are_tokens_over_seconds_of_a_repetition():
    """Turns of a repetition are added up before dividing, not averaged after."""
    turns = [turn("x", 0, 1.0, [[1] * 10]), turn("x", 0, 3.0, [[1] * 2]), turn("x", 1, 2.0, [[1] * 10])]
    assert rates(turns) == [3.0, 5.0]


def test_ratios_are_paired():
    """A ratio compares within a repetition, then takes the median: noise that hits both sides cancels."""
    turns = []
    for repeat, slowness in enumerate([1.0, 5.0, 1.0]):
        turns.append(turn("x", repeat, slowness, [[1] * 20]))
        turns.append(turn("y", repeat, slowness, [[1] * 10]))
    result = figures(turns, {"x": 1, "y": 4})
    assert result["x"]["ratio_to"] == {"y": 2.0}
    assert result["y"]["ratio_to"] == {"x": 0.5}
    assert result["x"]["tokens_per_second"] == {"median": 20.0, "repeats": [20.0, 4.0, 20.0]}
    assert (result["x"]["sessions"], result["y"]["sessions"]) == (1, 4)
    assert result["x"]["time_to_first_token_ms"] == {"median": 5.0, "max": 5.0}


def test_rates_by_dataset():
    """A data set has a rate where its prompts had turns of their own; mixed turns tell only its acceptance."""
    pure = figures([Turn("x", 0, (PROMPTS[0],), [Completion([1] * 4, 1.0, {"rounds": 2})], 2.0)], {"x": 1})
    assert pure["x"]["by_dataset"]["a"] == {
        "tokens_per_second": {"median": 2.0, "repeats": [2.0]},
        "mean_accepted_length": 2.0,
    }
    both = (PROMPTS[0], PROMPTS[-1])
    completions = [Completion([1] * 4, 1.0, {"rounds": 2}), Completion([1] * 4, 1.0, {"rounds": 4})]
    mixed = figures([Turn("x", 0, both, completions, 2.0)], {"x": 2})
    assert mixed["x"]["by_dataset"] == {"a": {"mean_accepted_length": 2.0}, "b": {"mean_accepted_length": 1.0}}


def test_speculation_adds_up():
    """Counts are summed, rates come from the sums, histograms of different lengths are added."""
    longer = STATS | {"accepted_lengths": [0, 1, 0, 1], "positions": [[2, 2], [1, 0], [1, 1]]}
    told = speculation([Completion([1] * 4, 1.0, STATS), Completion([1] * 4, 1.0, longer)])
    assert (told["rounds"], told["draft_tokens"], told["accepted_tokens"]) == (4, 8, 4)
    assert (told["acceptance_rate"], told["mean_accepted_length"]) == (0.5, 2.0)
    assert told["accepted_lengths"] == [1, 1, 1, 1]
    assert told["acceptance_by_depth"] == [0.75, 0.3333, 1.0]
    assert told["bytes_per_round"] == {"draft_bytes": 50.0, "verdict_bytes": 30.0}
    assert told["bytes_per_token"] == 40.0


def test_speculation_that_is_not_known():
    """A contestant that counts only rounds has no other speculation figures."""
    told = speculation([Completion([1] * 4, 1.0, {"rounds": 2})])
    assert told["mean_accepted_length"] == 2.0
    assert {told[name] for name in ("draft_tokens", "acceptance_rate", "bytes_per_token", "bytes_per_round")} == {None}


def test_table():
    """One row per contestant, and a dash for a missing figure."""
    seconds = {"transformers": 2.0, "plain": 4.0, "lookup": 1.6}
    turns = [turn(name, 0, duration, [[1] * 8]) for name, duration in seconds.items()]
    turns.append(turn("specq", 0, 1.0, [[1] * 8], STATS))
    header, first, *_, last = table(figures(turns, {"transformers": 1, "plain": 1, "lookup": 1, "specq": 16}))
    assert header == HEADER
    assert first == ("transformers", 1, "4.0", "-", "2.00x", "0.80x", "5", "-", "-", "-")
    assert last == ("specq", 16, "8.0", "2.00x", "4.00x", "1.60x", "5", "4.00", "50%", "20")


# --- differences --------------------------------------------------------------------------------------------------


def test_differences():
    """Each text is held against the first contestant's; the first position that differs, and the gap there."""
    asked = []

    def gap(context, one, other):
        asked.append((list(context), one, other))
        return 1e-5

    turns = [turn("x", 0, 1.0, [[1, 2, 3], [4]]), turn("y", 0, 1.0, [[1, 9, 9], [4]]), turn("x", 1, 1.0, [[1, 2], [4]])]
    found = differences(turns, gap)
    assert found == [Difference("x", "a/0", 2, -1, 3, None), Difference("y", "a/0", 1, 9, 2, 1e-5)]
    assert asked == [([1, 2, 1], 9, 2)]
    assert summary(turns, found)["num_near_ties"] == 1
    assert (summary(turns, found)["num_compared"], summary(turns, found)["num_different"]) == (6, 2)


def test_a_repeated_difference_is_reported_once():
    """Repetitions that differ in the same way are one finding."""
    turns = [turn("x", 0, 1.0, [[1]]), turn("y", 0, 1.0, [[2]]), turn("y", 1, 1.0, [[2]])]
    assert len(differences(turns, None)) == 1


@pytest.mark.parametrize("gap", [None, lambda *_: 0.5])
def test_unknown_or_wide_gaps_are_not_near_ties(gap):
    """An unknown or wide gap does not excuse a difference."""
    (found,) = differences([turn("x", 0, 1.0, [[1]]), turn("y", 0, 1.0, [[2]])], gap)
    assert not found.is_near_tie
    assert differences([], gap) == []

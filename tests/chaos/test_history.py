"""The checker of histories: it is silent about what may be, and names each thing that may not."""

from __future__ import annotations

import json
import random
from math import inf
from pathlib import Path
from typing import Any

import pytest

from specq.testing.toy import toy_text
from tests.chaos.cluster import is_good
from tests.chaos.history import Operation, check, moves_apart, read_history

PROMPT, NUM, SEED = [5, 6, 7], 6, 3
TEXT = toy_text(PROMPT, NUM, SEED)
OTHER = [1 + TEXT[0] % 49, *TEXT[1:]]


def op(kind: str, start: float, end: float | None = None, **what: Any) -> Operation:
    return Operation(kind, start, start if end is None else end, who="ann", broker="b", job=1, **what)


def read(start: float, num: int, end: float | None = None, **what: Any) -> Operation:
    """Return a look at the first tokens of the job. All of them: it has ended."""
    return op("read", start, end, **{"tokens": TEXT[:num], "finish": "length" * (num == NUM)} | what)


BEGIN = op("begin", 0.0, inf, prompt=PROMPT, num=NUM, seed=SEED)
OWN = [op("tokens", 1.0, tokens=TEXT[:2]), op("tokens", 3.0, base=2, tokens=TEXT[2:4])]
GOOD = [BEGIN, *OWN, read(2.0, 2), read(4.0, 6)]


def faults(*more: Operation) -> list[str]:
    return check(sorted([*GOOD, *more], key=lambda one: one.start))


def test_what_may_be() -> None:
    """Looks that overlap may end in any order, and what was never answered may or may not have happened."""
    assert faults() == []
    assert faults(read(0.5, 0), read(2.5, 2, 9.0), read(3.5, 6, 5.0)) == []
    assert faults(op("read", 0.1, error="unknown: no"), read(5.0, 6), op("cancel", 6.0, inf)) == []
    assert check([BEGIN]) == []
    assert check([BEGIN, op("tokens", 1.0, error="busy: later")]) == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (read(5.0, 0, tokens=OTHER[:3]), "what is no part of the text"),
        (read(5.0, 0, tokens=TEXT[1:]), "what is no part of the text"),
        (read(3.5, 1), "read 1 tokens at b after 4 of ann"),
        (read(3.5, 3), "read 3 tokens at b after 4 of ann"),
        (read(5.0, 5), "that it runs, after its end"),
        (read(5.0, 6, finish="stop"), "ended twice"),
        (read(5.0, 4, finish="cancelled"), "ended twice"),
        (op("read", 1.5, error="unknown: there is no job"), "though it had been accepted"),
        (op("tokens", 0.0, 4.5, error="lost: silent"), "though it had been accepted"),
    ],
)
def test_what_may_not_be(wrong: Operation, fault: str) -> None:
    assert any(fault in one for one in faults(wrong)), faults(wrong)


def test_ends() -> None:
    """One that is too short, one that nobody asked for, one that never came, and a text that no model says."""
    begun = [BEGIN, op("tokens", 1.0, tokens=TEXT[:4])]
    assert check([*begun, read(2.0, 4, finish="length")]) == ["job 1: ended with 4 of 6 tokens"]
    assert check([*begun, read(2.0, 4, finish="cancelled")]) == ["job 1: was cancelled by nobody"]
    assert check([*begun, op("cancel", 1.5, inf), read(2.0, 4, finish="cancelled")]) == []
    assert check([*begun, read(0.5, 3, 2.0, finish="length")])[0].endswith("with 3 tokens, and 4 were read")
    assert check(begun) == ["job 1: was accepted and never ended"]
    assert check(begun, all_ended=False) == []
    assert check([BEGIN, read(2.0, NUM, tokens=OTHER)]) == ["job 1: its text is not one of the model's"]
    assert check([BEGIN, op("ack", 1.0)], all_ended=False) == []


def test_one_key_has_one_answer() -> None:
    answers = [Operation("http", 1.0, 2.0, key="k", text=text) for text in ("a", "a", "b")]
    assert check(answers[:2]) == []
    assert check(answers) == ["key k: answered with two texts"]


def test_a_register_that_goes_back_is_found_in_any_history() -> None:
    """Looks at a text that grows are right, whatever their order. With one old copy among them they are not."""
    rng = random.Random(0)
    for _ in range(200):
        looks = [(at, at + rng.uniform(0.0, 4.0)) for at in (rng.uniform(0.0, 10.0) for _ in range(30))]
        right = [read(start, min(5, int(rng.uniform(start, end) / 2)), end) for start, end in looks]
        assert check([BEGIN, *right], all_ended=False) == []
        old = read(10.0, 4, 10.5), read(11.0, 3, 11.5)
        assert check([BEGIN, *right, *old], all_ended=False) != []


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "client.jsonl"
    path.write_text(f"{BEGIN.line()}\n{read(2.0, 2).line()}\n{read(3.0, 3).line()[:-9]}")
    assert read_history([path]) == [BEGIN, read(2.0, 2)]
    assert json.loads(BEGIN.line())["job"] == 1


DIED, MOVED = (10.0, "died"), (14.0, "moved")


@pytest.mark.parametrize(
    ("database", "since_back"),
    [
        ([], None),
        ([(1.0, "gone"), (9.0, "back")], None),
        ([(15.0, "gone"), (16.0, "back")], None),
        ([(1.0, "gone"), (11.0, "back")], 3.0),
        ([(11.0, "gone"), (12.0, "back")], 2.0),
        ([(1.0, "gone"), (10.5, "back"), (12.0, "gone"), (12.5, "back")], 1.5),
        ([(11.0, "gone"), (15.0, "back")], 0.0),
        ([(9.0, "gone"), (15.0, "back")], 0.0),
    ],
)
def test_moves_with_the_database_away_are_measured_apart(
    database: list[tuple[float, str]], since_back: float | None
) -> None:
    """Away at any time between the death and the move; neither the move before nor the one after matters."""
    others = [(0.0, "died"), (0.5, "moved"), (20.0, "died"), (22.0, "moved")]
    there, away = moves_apart([*others, DIED, MOVED, *database])
    assert there == ([0.5, 4.0, 2.0] if since_back is None else [0.5, 2.0])
    assert away == ([] if since_back is None else [(4.0, since_back)])


def test_each_kind_of_move_has_its_own_limit() -> None:
    """5 s after the death, and with the database away 5 s after it is back."""
    whole = {"lost": 0, "doubled": 0, "wrong": 0, "stuck": [], "history": {"wrong": 0}}
    names = ("move_max_s", "away_move_max_s", "away_move_back_max_s")
    for times, expected in [
        ((None, None, None), True), ((5.0, 9.0, 5.0), True), ((5.1, None, None), False), ((4.0, 9.0, 5.1), False),
    ]:  # fmt: skip
        assert is_good(whole | dict(zip(names, times, strict=True))) == expected

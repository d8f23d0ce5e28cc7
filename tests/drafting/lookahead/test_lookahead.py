"""Lookahead decoding: the window, its n-grams, and what becomes of them in a verifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specq.config import TargetConfig
from specq.drafting.lookahead.source import LookaheadDecoder, LookaheadWindow
from specq.protocol import LOOKAHEAD_LANE, ConfigError, Judgement, SessionStep
from specq.testing.conformance.sources import Serving
from specq.testing.toy import ToyEngine, toy_info
from specq.verifier import StepCurve, Verifier
from specq.verifier.sources import Budget
from tests.verifier.sessions import make_session

FLAT = Budget(StepCurve([1, 512], [0.005, 0.005]), 0.0)
STEEP = Budget(StepCurve([1, 512], [0.001, 0.512]), 0.0)


def after(token: int) -> int:
    """What a target says that looks at the last token alone."""
    return (token * 7 + 3) % 50


def run(window: LookaheadWindow, text: list[int], num_columns: int, num_steps: int) -> None:
    for _ in range(num_steps):
        rows = window.rows(text, num_columns)
        window.learn([after(token) for token in rows.token_ids.tolist()])
        text.append(after(text[-1]))


def test_the_rows_of_a_window_are_columns_below_a_chain() -> None:
    """Each token stands one place behind the one that it follows."""
    window = LookaheadWindow(4, 3)
    text = [5, 6, 7, 8]
    run(window, text, 3, 2)
    rows = window.rows(text, 3)
    assert rows.parents.tolist() == [-1, 0, 1, *range(6)]
    assert rows.positions.tolist() == [6, 7, 8, 7, 8, 9, 8, 9, 10]
    assert rows.token_ids.tolist() == [6, 7, 8, *map(after, (6, 7, 8)), *map(after, map(after, (6, 7, 8)))]


def test_ngrams_are_what_the_target_says_step_by_step() -> None:
    """Of N tokens; once the window has all its levels."""
    window, text = LookaheadWindow(4, 3), [5, 6, 7, 8]
    run(window, text, 3, 2)
    assert not window.pool
    run(window, text, 3, 1)
    assert set(window.pool) == {6, 7, 8}
    run(window, text, 3, 20)
    for first, ngrams in window.pool.items():
        expected = [first]
        for _ in range(3):
            expected.append(after(expected[-1]))
        assert ngrams == [tuple(expected[1:])]
    drafted = window.drafts(after(6), 3, 64)
    assert drafted.parents == [-1, 0, 1]
    assert drafted.token_ids == [after(after(6)), after(after(after(6))), after(after(after(after(6))))]


def test_no_more_guesses_are_kept_than_asked_for_and_the_newest_comes_first() -> None:
    """They share what they begin with."""
    window = LookaheadWindow(3, 2)
    for rest in ((1, 2), (3, 4), (1, 5), (3, 4)):
        window._keep(9, rest)
    assert window.pool[9] == [(3, 4), (1, 5)]
    window._keep(9, (3, 6))
    drafted = window.drafts(9, 2, 64)
    assert (drafted.token_ids, drafted.parents) == ([3, 6, 4], [-1, 0, 0])
    assert len(window.drafts(9, 2, 2).token_ids) == 2
    assert window.drafts(9, 1, 64).token_ids == [3]
    assert window.drafts(8, 2, 64).token_ids == []


@pytest.mark.parametrize(("before", "columns"), [(6, 4), (4, 7)])
def test_a_window_is_narrowed_at_once_and_widened_by_much_only(before: int, columns: int) -> None:
    """To widen it is to begin anew."""
    window, text = LookaheadWindow(3, 3), list(range(1, 20))
    run(window, text, before, 3)
    window.rows(text, columns)
    assert (window.num_columns, len(window.levels)) == (4, 2)
    window.rows(text, 12)
    assert (window.num_columns, len(window.levels)) == (12, 1)


class LastToken(ToyEngine):
    """A target whose next token depends on the last one alone: lookahead decoding finds all that it will say."""

    def _run(self, step: SessionStep) -> Judgement | None:
        context = self.contexts[step.session_id]
        context.extend(step.token_ids.tolist())
        if not step.judged:
            return None
        path, last = list[int](), context[-1]
        while True:
            parent, last = path[-1] if path else -1, after(last)
            nodes = zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True)
            found = [i for i, node in enumerate(nodes) if node == (last, parent)]
            if not found:
                break
            path.append(found[0])
        tokens = step.tree.token_ids[path].tolist()
        context.extend(tokens)
        return Judgement(step.session_id, tuple(path), np.array([*tokens, last], np.int32))

    def _scratch_logits(self, step: SessionStep) -> np.ndarray:
        return np.eye(50, dtype=np.float32)[[after(token) for token in step.scratch.token_ids.tolist()]]


def served(**options: object) -> tuple[int, list[int], Verifier]:
    """Return how many steps a text took."""
    source = LookaheadDecoder(toy_info(), **{"window": 8, "ngram": 4, **options})  # type: ignore[arg-type]
    serving = Serving([source], lambda verifier: None, engine=LastToken())
    serving.open(0)
    text = serving.finish()[0]
    return serving.verifier.num_steps, text, serving.verifier


def test_a_text_takes_fewer_steps_and_stays_the_targets() -> None:
    """Drafts are accepted, and reported by their lane."""
    num_steps, text, verifier = served(is_adaptive=False)
    expected = [after(7)]
    while len(expected) < len(text):
        expected.append(after(expected[-1]))
    assert text == expected
    assert num_steps < 30
    num_verified, num_accepted = verifier.meter.metrics()["judged"]["lookahead"]
    assert num_verified >= num_accepted > 10
    assert verifier.sources.num_scratch["lookahead"] > 100


def test_a_source_that_is_not_allowed_asks_for_no_rows() -> None:
    """Its window waits."""
    source = LookaheadDecoder(toy_info(), window=4, ngram=3, is_adaptive=False)
    serving = Serving([source], lambda verifier: None)
    serving.open(0)
    serving.verifier.policy.allowed = frozenset()
    serving.turn()
    assert serving.verifier.sources.num_scratch["lookahead"] == 0


def test_windows_are_as_wide_as_rows_are_free() -> None:
    """With one session and with many. Where each row costs time, no window is used, and no step is slower."""
    source = LookaheadDecoder(toy_info(), window=15, ngram=5)
    sessions = [make_session(list(range(1, 9)), session_id=i) for i in range(4)]

    def width(budget: Budget, some: Sequence[object]) -> int:
        source.collect(sessions[: len(some)], budget, lambda: 0.0)
        return source.scratch(sessions[0]).num_rows

    assert width(FLAT, sessions[:1]) == 15
    assert width(STEEP, sessions[:1]) == 0
    knee = Budget(StepCurve([1, 64, 512], [0.005, 0.005, 0.04]), 0.0)
    assert width(knee, sessions[:1]) == 15
    assert 0 < width(knee, sessions) < 15
    assert LOOKAHEAD_LANE not in {lane for session in sessions for lane in session.trees.lanes(session.place)}


def test_no_window_fits_near_the_end_of_a_text() -> None:
    """Its rows stand behind the text, where the model has places."""
    source = LookaheadDecoder(toy_info(), window=4, ngram=3, is_adaptive=False)
    for tokens_left, num_rows in ((20, 4), (3, 0)):
        session = make_session([1, 2, 3, 4, 5], tokens_left=tokens_left, session_id=tokens_left)
        source.collect([session], FLAT, lambda: 0.0)
        assert source.scratch(session).num_rows == num_rows


@pytest.mark.parametrize(
    ("name", "value", "said"), [("window", 0, "from 1"), ("ngram", 1, "from 2"), ("guesses", -1, "from 0")]
)
def test_sizes_that_make_no_sense_are_refused(name: str, value: int, said: str) -> None:
    """With what would be right."""
    with pytest.raises(ConfigError, match=f"target.lookahead_{name} is {value}, but must be {said}"):
        TargetConfig(**{f"lookahead_{name}": value})  # type: ignore[arg-type]

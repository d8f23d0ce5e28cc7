"""Whether drafts are right less often than they were."""

from __future__ import annotations

import math
from collections.abc import Iterable

from specq.verifier.control.traffic import FADE, Traffic
from specq.verifier.control.window import Window


def window(tokens: Iterable[int], seconds: float = 0.01, verdicts: int = 8) -> Window:
    """A window of steps of so many sessions, which gave these tokens."""
    found = Window()
    for count in tokens:
        found.add(count, seconds, verdicts)
    return found


def settled(usual: Window) -> Traffic:
    """What has seen so many such windows that it knows how much they differ."""
    traffic = Traffic()
    assert not any(traffic.fall(usual) for _ in range(30))
    return traffic


def test_fewer_tokens_a_round_are_seen_once() -> None:
    traffic = settled(window([24, 25] * 10))
    assert math.isclose(traffic.fall(window([16, 17] * 10)), math.log(24.5 / 16.5), rel_tol=0.01)
    assert not traffic.fall(window([16, 17] * 10))


def test_a_slower_machine_and_fewer_sessions_say_nothing() -> None:
    traffic = settled(window([24, 25] * 10))
    assert not traffic.fall(window([24, 25] * 10, seconds=0.05))
    assert not traffic.fall(window([3] * 20, verdicts=1))


def test_steps_that_compute_prompts_say_nothing() -> None:
    """Their sessions do not count, so nor do their tokens: else a plain decoder that is done with a burst of prompts
    would give less."""
    traffic = settled(window([8] * 20))
    mixed = window([8] * 5)
    for _ in range(40):
        mixed.add(8, 0.01, 0, steps=0)
    for _ in range(3):
        assert not traffic.fall(mixed)
    assert not traffic.fall(window([8] * 20))
    only_prompts = Window()
    only_prompts.add(8, 0.01, 0, steps=0)
    assert not traffic.fall(only_prompts)


def test_what_lies_within_noise_says_nothing() -> None:
    """Of few steps of one session, each of which gives 1 or 5 tokens."""
    traffic = settled(window([1, 5] * 10, verdicts=1))
    assert not traffic.fall(window([1, 1, 1, 5] * 5, verdicts=1))
    traffic = settled(window([1, 5] * 10, verdicts=1))
    assert traffic.fall(window([1, 1, 1, 5] * 50, verdicts=1)), "many steps say it"


def test_texts_of_which_one_is_easier_than_another_say_nothing() -> None:
    """Although their steps are all alike."""
    traffic = Traffic()
    texts = [window([24] * 20), window([16] * 20)] * 20
    assert not any(traffic.fall(text) for text in texts)


def test_what_is_usual_follows_slowly() -> None:
    traffic = Traffic()
    traffic.fall(window([16] * 20))
    for _ in range(5):
        assert not traffic.fall(window([32] * 20))
    assert traffic.usual is not None
    assert math.isclose(traffic.usual, math.log(4) - (1 - FADE) ** 5 * math.log(2))


def test_a_window_without_decoding_says_nothing() -> None:
    traffic = settled(window([24, 25] * 10))
    assert not traffic.fall(window([1] * 5, verdicts=0))
    assert not traffic.fall(Window())

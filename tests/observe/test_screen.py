"""`specq top` on a terminal, without one: keys, sizes, silence of the broker."""

from __future__ import annotations

import pytest

from specq.observe import Snapshot, View
from specq.observe.screen import STYLES, Screen, painted
from specq.protocol import JobError
from tests.each import each
from tests.observe.test_snapshot import report, session, worker


@pytest.fixture
def screen() -> Screen:
    listed = tuple(session(100 + i, tokens=i, label=f'"job{i}"') for i in range(40))
    return Screen("tcp://127.0.0.1:5750", Snapshot(report(10.0, (worker(),), listed)), View(sort_by="TOKENS"))


def lines(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    return [line for line, _ in screen.render(width, height)]


@each("size", [(80, 24), (40, 10), (200, 60), (20, 4)])
def test_it_fills_any_size_and_no_more(screen, size):
    shown = lines(screen, *size)

    assert len(shown) == size[1]
    assert max(map(len, shown)) <= size[0]


@each("width", [60, 80, 100])
def test_no_counter_is_cut(width):
    """The line of counters goes on below, between two words."""
    counts = {f"a_counter_{number}": 1234567 * number for number in range(1, 9)}
    busy = Screen("tcp://127.0.0.1:5750", Snapshot(report(10.0, (worker(),)) | {"counts": counts}), View())
    shown = " ".join(line.strip() for line in lines(busy, width))
    assert all(f"{name} {count}" in shown for name, count in counts.items())


def test_sessions_scroll_as_far_as_there_are_any(screen):
    assert "139" in "\n".join(lines(screen))
    for _ in range(100):
        screen.press("down")
    assert "100" in lines(screen)[-2]
    screen.press("up")
    assert "101" in lines(screen)[-2]


def test_s_sorts_by_the_next_column_and_r_reverses(screen):
    screen.press("r")
    assert "100" in next(line for line in lines(screen) if "job0" in line)
    screen.press("s")
    assert screen.view == View(sort_by="ACC", reverse=True)
    assert "sorted by ACC reversed" in lines(screen)[-1]


def test_f_filters_while_q_is_a_letter(screen):
    for key in ("f", *"jobq", "backspace", *"39", "enter"):
        assert screen.press(key)
    assert screen.view.filter_by == "job39"
    assert "138" not in "\n".join(lines(screen))
    for key in ("f", "escape"):
        screen.press(key)
    assert screen.view.filter_by == ""


def test_q_quits(screen):
    assert not screen.press("q")


def test_a_pause_holds_the_picture(screen):
    screen.press("p")
    screen.take(report(11.0))
    assert screen.snapshot.report["workers"]
    assert "PAUSED" in lines(screen)[-1]
    screen.press("p")
    screen.take(report(12.0))
    assert not screen.snapshot.report["workers"]


def test_a_silent_broker_is_said_and_forgotten_when_it_answers(screen):
    """What was last known stays in sight."""
    screen.take(JobError("the broker at x has been silent for 10 s", "lost"))
    shown = "\n".join(lines(screen))
    assert "NO ANSWER" in shown
    assert "139" in shown
    screen.take(report(11.0))
    assert "NO ANSWER" not in "\n".join(lines(screen))


def test_a_painted_screen_overwrites_the_one_before(screen):
    """From its first place on, each line up to its end; the last one does not scroll."""
    shown = screen.render(80, 24)
    assert {style for _, style in shown} <= STYLES.keys()
    text = painted(shown, with_style=True)
    assert text.startswith("\x1b[H\x1b[1mspecq top")
    assert text.count("\n") == 23
    assert text.count("\x1b[K") == 24
    assert "\x1b[7m" in text.splitlines()[-1]


def test_without_colours_only_the_places_are_controlled(screen):
    text = painted(screen.render(80, 24), with_style=False)
    assert not any(f"\x1b[{codes}m" in text for codes in STYLES.values() if codes)

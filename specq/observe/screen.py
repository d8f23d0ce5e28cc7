"""`specq top` on a terminal: the sections of `specq.observe.sections`, with keys to sort and filter.

The sections fit the size of the terminal.

Rules: one thread queries the broker, so that keys work while the broker is silent. The text is readable without
colours. The terminal is restored at the end, on Ctrl-C, on SIGTERM and on an error.

`Keyboard` reads keys without Enter. It restores the terminal in all cases.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from specq.config import wants_colours
from specq.observe.report import Report, Snapshot
from specq.observe.sections import SORTS, View, ViewSection, clean, headline, queues, sections, wrapped
from specq.protocol import JobError

_SEQUENCES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b": "escape"}
_NAMES = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\b": "backspace", "\x04": "q"}


class Keyboard:
    """The terminal at standard input."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def keys(self, timeout_s: float) -> list[str]:
        """Wait for keys at most `timeout_s`.

        Returns the typed characters, or the names of other keys.
        """
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        typed = os.read(self._fd, 1024)
        if not typed:  # the terminal is gone
            return ["q"]
        if typed in _SEQUENCES:
            return [_SEQUENCES[typed]]
        if typed.startswith(b"\x1b"):
            return []
        return [_NAMES.get(one, one) for one in typed.decode("utf-8", "replace")]


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys one by one, and do not show them."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


KEY_S = 0.1
KEYS = "q quit  s sort  r reverse  f filter  p pause"
SCROLLED = "sessions"  # the section that takes the remaining room, and scrolls
MOST_LINES = 6  # of each other section, if room is short


@dataclass
class Screen:
    """The shown content and the typed keys."""

    address: str
    snapshot: Snapshot
    view: View
    trouble: str = ""
    heard: float = field(default_factory=time.monotonic)
    offset: int = 0
    is_paused: bool = False
    typed: str | None = None  # a filter that the user is typing

    def take(self, answer: Report | JobError) -> None:
        """Store the broker's answer, or its error."""
        if isinstance(answer, JobError):
            self.trouble = str(answer)
            return
        self.trouble, self.heard = "", time.monotonic()
        if not self.is_paused:
            self.snapshot = Snapshot(answer, self.snapshot.report)

    def press(self, key: str) -> bool:
        """Handle a key; return False to quit."""
        if self.typed is not None:
            self._type(self.typed, key)
        elif key in "qQ":
            return False
        elif key in _ACTIONS:
            _ACTIONS[key](self)
        return True

    def _type(self, typed: str, key: str) -> None:
        if key == "enter":
            self.view, self.typed, self.offset = replace(self.view, filter_by=typed), None, 0
        elif key == "escape":
            self.view, self.typed = replace(self.view, filter_by=""), None
        elif key == "backspace":
            self.typed = typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed = (typed + key)[:60]

    def sort(self) -> None:
        """Sort sessions by the next column."""
        names = list(SORTS)
        self.view = replace(self.view, sort_by=names[(names.index(self.view.sort_by) + 1) % len(names)])

    def reverse(self) -> None:
        self.view = replace(self.view, reverse=not self.view.reverse)

    def begin_filter(self) -> None:
        self.typed = self.view.filter_by

    def pause(self) -> None:
        self.is_paused = not self.is_paused

    def scroll(self, lines: int) -> None:
        self.offset = max(0, self.offset + lines)

    # --- as text ------------------------------------------------------------------------------------------------------

    def render(self, width: int, height: int) -> list[tuple[str, str]]:
        """Return the lines that fill a screen of this size, each with its style, a key of STYLES."""
        title = wrapped(f"specq top  {self.address}  {headline(self.snapshot)}", width)
        head = [*((line, "bold") for line in title), *((line, "") for line in wrapped(queues(self.snapshot), width))]
        if self.trouble:
            silent_s = time.monotonic() - self.heard
            head.append((f"NO ANSWER for {silent_s:.0f} s, retrying: {clean(self.trouble, 500)}", "bold red"))
        lines = [*head, *self._body(width, height - len(head) - 1)]
        lines = [*lines[: height - 1], *[("", "")] * (height - 1 - len(lines)), (self._footer(), "reverse")]
        return [(line[:width], style) for line, style in lines]

    def _body(self, width: int, height: int) -> list[tuple[str, str]]:
        found = sections(self.snapshot, self.view)
        others = sum(2 + min(len(one.rows) + 1, MOST_LINES) for one in found if one.title != SCROLLED)
        lines: list[tuple[str, str]] = [] if found else [("", ""), ("no workers, or no row matches the filter", "")]
        for section in found:
            room = max(3, height - others - 2) if section.title == SCROLLED else MOST_LINES
            lines += [("", ""), *self._section(section, width, room)]
        return lines

    def _section(self, section: ViewSection, width: int, room: int) -> list[tuple[str, str]]:
        """Return a section's title and at most `room` further lines."""
        header, *rows = section.lines(width)
        most = max(1, room - 1)
        if section.title == SCROLLED:
            self.offset = min(self.offset, max(0, len(rows) - most))
        first = self.offset if section.title == SCROLLED else 0
        hidden = len(rows) - len(rows[first : first + most])
        title = section.headline + (f"  [{hidden} more]" if hidden else "")
        return [(title, "bold cyan"), (header, "dim"), *((row, "") for row in rows[first : first + most])]

    def _footer(self) -> str:
        if self.typed is not None:
            return f"filter: {self.typed}_   Enter applies it, Esc clears it"
        order = f"{self.view.sort_by}{' reversed' if self.view.reverse else ''}"
        marks = [
            f"sorted by {order}",
            f"filter {self.view.filter_by!r}" if self.view.filter_by else "",
            "PAUSED" * self.is_paused,
        ]
        return "  ".join([*(mark for mark in marks if mark), KEYS])


_ACTIONS: dict[str, Callable[[Screen], None]] = {
    "s": Screen.sort,
    "r": Screen.reverse,
    "f": Screen.begin_filter,
    "/": Screen.begin_filter,
    "p": Screen.pause,
    " ": Screen.pause,
    "up": lambda screen: screen.scroll(-1),
    "down": lambda screen: screen.scroll(1),
    "k": lambda screen: screen.scroll(-1),
    "j": lambda screen: screen.scroll(1),
}


# --- the loop ---------------------------------------------------------------------------------------------------------


class _Asker:
    """Queries the broker repeatedly in its own thread; `answer` returns the newest answer once."""

    def __init__(self, ask: Callable[[], Report], interval_s: float) -> None:
        self._ask, self._interval_s = ask, interval_s
        self._answers: list[Report | JobError] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="specq-top", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                self._answers[:] = [self._ask()]
            except JobError as error:
                self._answers[:] = [error]

    def answer(self) -> Report | JobError | None:
        """Return the answer since the last call."""
        return self._answers.pop() if self._answers else None

    def end(self) -> None:
        self._ended.set()


def watch(ask: Callable[[], Report], first: Report, view: View, interval_s: float, address: str) -> None:
    """Show a broker's reports until q or Ctrl-C."""
    screen, asker = Screen(address, Snapshot(first), view), _Asker(ask, interval_s)
    try:
        with _sigterm_raises(), contextlib.suppress(KeyboardInterrupt), keyboard() as typed:
            _show(screen, asker, typed)
    finally:
        asker.end()


def _show(screen: Screen, asker: _Asker, typed: Keyboard) -> None:
    with _other_screen():
        shown: object = None
        while True:
            size = shutil.get_terminal_size()
            if shown != size or screen.trouble:
                _write(painted(screen.render(size.columns, size.lines), with_style=wants_colours()))
                shown = size
            pressed = typed.keys(KEY_S)
            if not all(map(screen.press, pressed)):
                return
            if (answer := asker.answer()) is not None:
                screen.take(answer)
            if pressed or answer is not None:
                shown = None


# Control sequences of terminals (ECMA-48, xterm).
STYLES = {"": "", "bold": "1", "dim": "2", "reverse": "7", "bold red": "1;31", "bold cyan": "1;36"}
_HOME, _PLAIN, _REST_OF_LINE = "\x1b[H", "\x1b[0m", "\x1b[K"
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # other screen, no cursor, no wrapping of lines
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"


def painted(lines: Sequence[tuple[str, str]], *, with_style: bool) -> str:
    """Return what makes a terminal show these lines and nothing else."""
    starts = {style: f"\x1b[{codes}m" if codes and with_style else "" for style, codes in STYLES.items()}
    return _HOME + "\n".join(starts[style] + line + _PLAIN + _REST_OF_LINE for line, style in lines)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _other_screen() -> Iterator[None]:
    """Show the terminal's other screen meanwhile, so that the user's text stays as it is."""
    try:
        _write(_ENTER)
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            _write(_LEAVE)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise, so that the terminal is restored."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

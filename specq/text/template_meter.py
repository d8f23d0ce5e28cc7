"""The time and size that the rendering of a chat template has used, for `template_limits`.

Rule: the time is the thread's own processor time. So a busy machine does not cause a refusal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

TIME_LIMIT_S = 2.0  # of processor time, to compile and render; usual conversations take less than a millisecond
SIZE_LIMIT = 1 << 26  # characters and list entries in all results, and in any one value
BITS_LIMIT = 1 << 14  # of an integer: longer ones are slow to compute
STEPS_A_LOOK, LONG_STEP = 32, 1 << 16  # check the clock after this many steps, and after each longer step
_WITH_PARTS = (dict, list, tuple, set, frozenset, Namespace)


class TemplateLimitError(TemplateError):
    """A template takes too long, or makes too much."""


class Meter:
    """The time and size that one rendering has used."""

    __slots__ = ("_end", "_made", "_steps")

    def __init__(self) -> None:
        self._end, self._made, self._steps = time.thread_time() + TIME_LIMIT_S, 0, 0

    def step(self, size: int = 0) -> None:
        """Count a step, and the characters or entries that it makes. Raises TemplateLimitError beyond a limit.

        Reading the clock takes longer than most steps, so only some steps read it.
        """
        self._steps += 1
        if size:
            self._made += size
            check_size(self._made)
        if self._steps % STEPS_A_LOOK == 0 or size > LONG_STEP:
            self.look()

    def look(self) -> None:
        """Raise TemplateLimitError if the time is over."""
        if time.thread_time() > self._end:
            raise TemplateLimitError(f"it takes more than {TIME_LIMIT_S:g} s")


_thread = threading.local()


@contextmanager
def limited() -> Iterator[None]:
    """Start the limits for what this thread compiles and renders."""
    _thread.meter = Meter()
    try:
        yield
    finally:
        del _thread.meter


def step(size: int = 0) -> None:
    """Count a step of this thread's rendering; see `Meter.step`."""
    _thread.meter.step(size)


# --- sizes --------------------------------------------------------------------------------------------------------


def check_size(size: int) -> None:
    """Raise TemplateLimitError if the size exceeds the limit."""
    if size > SIZE_LIMIT:
        raise TemplateLimitError(f"it makes more than {SIZE_LIMIT} characters")


def bits_size(count: int) -> int:
    """Return the size of an integer with `count` bits: above the limit if it is slow, else 0."""
    return SIZE_LIMIT + 1 if count > BITS_LIMIT else 0


def size_of(value: Any) -> int:
    """Return the characters and entries of a value, each as often as it is printed. It stops beyond the limit."""
    if isinstance(value, str | bytes):
        return len(value)
    waiting, total = [value], 0
    while waiting and total <= SIZE_LIMIT:
        one = waiting.pop()
        inner = parts(one)
        total += 1 + (len(one) if isinstance(one, str | bytes) else len(inner))
        waiting.extend(inner)
        _thread.meter.step()
    return total


def parts(value: Any) -> Sequence[Any]:
    """Return the parts of a value; a text has none."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return parts(value._Namespace__attrs) if isinstance(value, Namespace) else ()  # noqa: SLF001


def counted(value: Any) -> Any:
    """Count a new value, and return it."""
    if isinstance(value, str | bytes):
        _thread.meter.step(len(value))
    elif isinstance(value, int):
        check_size(bits_size(value.bit_length()))
    elif isinstance(value, _WITH_PARTS):
        check_size(size_of(value))
        _thread.meter.step(len(parts(value)))
    return value


def looked(value: Any) -> Any:
    """Check the time before a long value is read, and return the value."""
    is_long = len(value) > LONG_STEP if isinstance(value, str | bytes) else isinstance(value, _WITH_PARTS)
    if is_long:
        _thread.meter.look()
    return value


def printed(value: Any) -> Any:
    """Count a printed value, and return it."""
    if isinstance(value, str):
        _thread.meter.step(len(value))
    elif parts(value):
        check_size(size_of(value))
    return value


def turns(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop, and count each iteration."""
    for value in values:
        step()
        yield value

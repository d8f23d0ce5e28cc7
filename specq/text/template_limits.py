"""Jinja's sandbox with limits of time and size, for untrusted templates. In any thread, without signals.

A `Meter` has the time and size that a rendering has used. Rule: the time is the thread's own processor time. So a busy
machine does not cause a refusal.

A template is rewritten before it is compiled, so that a `Meter` sees its steps:

- a loop iteration, a call, an operator: checks the time.
- a comparison, a test, a filter: checks the time, always if a value may be long.
- a new text or list: is counted. This happens before it is made, if it may be much longer than its parts.
- a printed value: is counted when it is printed.

Rule: the input of a step is bounded. So no single step takes long, and the next check of the time comes soon. An
operation that lengthens texts, or is slow per character, needs a line in `_GROWTH`."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

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


TEMPLATE_LIMIT = 1 << 17  # most characters of a template: compiling more takes longer than the time limit
PRECISION_LIMIT = 400  # most digits for `round`: more than a float has


# --- operations that make more than they are given ----------------------------------------------------------------


def _product(first: Any, *others: Any, **named: Any) -> int:
    """Return a bound for a result that may grow with each argument."""
    total = max(1, size_of(first))
    for other in (*others, *named.values()):
        total *= max(1, abs(other) if isinstance(other, int) else size_of(other))
    return total


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text, old, new = (one if isinstance(one, bytes) else str(one) for one in (text, old, new))
    return len(text) + (len(text) // max(1, len(old)) + 1) * len(new)


def _formatted(text: Any, *values: Any, **named: Any) -> int:
    """Return a bound for a format, from its widths and from its values, which may be widths or repeated."""
    given = [*values, *named.values()]
    form = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    widths = sum(int(digits) for digits in re.findall(r"\d{1,12}", form))
    if "*" in form or re.search(r"\{[^}]*\{", form):
        widths += sum(abs(value) for value in given if isinstance(value, int))
    return len(form) + widths + (form.count("%") + form.count("{")) * max(map(size_of, given), default=0)


def _rounded(_number: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    return SIZE_LIMIT + 1 if isinstance(precision, int) and abs(precision) > PRECISION_LIMIT else 0


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    del attribute
    return 0 if isinstance(start, int | float) else size_of(values) * len(parts(values))


def _wrapped(text: Any, width: Any = 79, long_words: Any = True, wrapstring: Any = None, *_: Any, **__: Any) -> int:
    """Return a bound: a long word is copied for each line that it makes."""
    del long_words
    return size_of(text) * max(1, len(str(wrapstring or "")), size_of(text) // max(1, int(width)))


def _slow(value: Any, *_: Any, **__: Any) -> int:
    return 16 * size_of(value)


_GROWTH: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "join", "translate"), _product),
    **dict.fromkeys(("indent", "batch", "slice", "tojson"), _product),
    **dict.fromkeys(("format", "format_map"), _formatted),
    **dict.fromkeys(("pprint", "title", "urlize", "wordcount"), _slow),
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "wordwrap": _wrapped,
}


def _check_growth(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    growth = _GROWTH.get(name)
    if growth is not None:
        check_size(growth(*arguments, **named))


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse a result of an operator that would be slow to make. A sum is counted when it is made."""
    if operator == "+":
        return
    if operator == "%" and isinstance(left, str | bytes):
        values = right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else (right,)
        check_size(_formatted(left, *values))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_size(bits_size(left.bit_length() * abs(right)))
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        check_size(bits_size(left.bit_length() + right.bit_length()))
    elif operator == "*":
        times, value = (left, right) if isinstance(left, int) else (right, left)
        check_size(size_of(value) * times if isinstance(times, int) else 0)


def _limited_filter(name: str, function: Any) -> Callable[..., Any]:
    before = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment, or the context

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if name in _GROWTH and isinstance(arguments[before], Iterator):
            arguments = (*arguments[:before], list(turns(arguments[before])), *arguments[before + 1 :])
        for argument in arguments[before:]:
            looked(argument)
        _check_growth(name, arguments[before:], named)
        return counted(function(*arguments, **named))

    return call


# --- the environment ----------------------------------------------------------------------------------------------


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with the limits. Compiling and rendering must run within `limited`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=printed, **options)
        del self.globals["lipsum"]  # makes long texts

    def from_text(self, text: str) -> Template:
        """Return the compiled template, with the current filters."""
        if len(text) > TEMPLATE_LIMIT:
            raise TemplateLimitError(f"it has more than {TEMPLATE_LIMIT} characters")
        self.filters = {name: _limited_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _limited_filter(name, function) for name, function in self.tests.items()}
        self.filters |= {_Rewriter.turns: turns, _Rewriter.counted: counted, _Rewriter.looked: looked}
        tree = _Rewriter().visit(self.parse(text))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of the template, a macro or a block."""
        printed = list(pieces)
        step(sum(map(len, printed)))
        return "".join(printed)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return counted(self.binop_table[operator](left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        step()
        method = getattr(called, "__wrapped__", called)  # inside the sandbox's wrapper of `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _check_growth(method.__name__, (owner, *args), kwargs)
        if isinstance(called, Macro) and (called.catch_varargs or called.catch_kwargs):
            counted([*args, *kwargs.values()])
        made = super().call(context, called, *args, **kwargs)
        makes = isinstance(owner, str | bytes | type) or isinstance(called, type)
        return counted(made) if makes else made


class _Rewriter(NodeTransformer):
    """Adds counting filters to loops, to texts that are joined, cut or compared, and to lists."""

    turns, counted, looked = "specq_turns", "specq_counted", "specq_looked"

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        node.iter = _filtered(node.iter, self.turns)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, self.counted)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, self.counted) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            side.expr = side.expr if isinstance(side.expr, nodes.Const) else _filtered(side.expr, self.looked)
        return node

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_target or is_constant else _filtered(node, self.counted)

    visit_List = visit_Tuple = visit_Dict = _visit_literal  # noqa: N815


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

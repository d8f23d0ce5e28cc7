"""Write text with its origin: in colours, or between marks without colours.

Rule: the text of a model cannot control the terminal. Its control characters are shown, not sent.

`summary` describes an answer in a line.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TextIO

import click

from specq.client import Result
from specq.config import wants_colours
from specq.protocol import (
    BLOCK,
    COLOCATED,
    CORRECTED,
    DRAFT_WORKER,
    DRAFTED,
    EAGLE,
    GRAMMAR,
    LOOKAHEAD,
    LOOKUP,
    MEDUSA,
    ORIGINS,
    OWN,
    PLAIN,
    SHOWN,
    SUFFIX,
)


@dataclass(frozen=True, slots=True)
class TextMark:
    """The look of text of one origin: its colour, or marks around it without colours."""

    meaning: str
    colour: str | None = None
    opening: str = ""
    closing: str = ""


_ANGLES = ("\u2039", "\u203a")  # small ones, similar to < and >
_COLOURS = {
    COLOCATED: "green",
    DRAFT_WORKER: "cyan",
    LOOKUP: "bright_blue",
    LOOKAHEAD: "magenta",
    SUFFIX: "bright_blue",
    MEDUSA: "bright_magenta",
    EAGLE: "bright_cyan",
    GRAMMAR: "bright_black",
    BLOCK: "bright_green",
}  # of accepted drafts, by source; others are green
MARKS = {  # one for each name of `specq.protocol.ORIGINS`
    **{name: TextMark(f"accepted: {SHOWN[name]}", _COLOURS.get(name, "green")) for name in ORIGINS if name in SHOWN},
    OWN: TextMark("the target's own", None, *_ANGLES),
    PLAIN: TextMark("the target's own, nothing was drafted here", None, *_ANGLES),
    CORRECTED: TextMark("corrected by the target", "yellow", "«", "»"),
    DRAFTED: TextMark("drafted and accepted", "green"),
}
LEGENDS = {
    "plain": (),
    "marks": (DRAFTED, CORRECTED, PLAIN),
    "colours": (COLOCATED, DRAFT_WORKER, SUFFIX, LOOKAHEAD, CORRECTED, PLAIN),
}
NO_MARK = TextMark("")
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_SHOWN |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # the other control characters, which some terminals execute


class Pen:
    """Writes pieces of text; `finish` ends the line. `style` is colours, marks, or plain."""

    def __init__(self, style: str) -> None:
        self.style = style
        self._mark = NO_MARK

    def write(self, text: str, origin: str) -> None:
        """Write text of one origin."""
        if self.style == "plain":
            click.echo(text, nl=False, color=True)  # unchanged, also to a file
            return
        click.echo(f"{self._change_to(MARKS[origin])}{text.translate(_SHOWN)}", nl=False, color=True)

    def finish(self) -> None:
        """End the line."""
        click.echo(self._change_to(NO_MARK), color=True)

    def legend(self, absent: Collection[str] = ()) -> None:
        """Print the meaning of the colours or marks in a line, if there are any.

        absent  origins that cannot occur.
        """
        for origin in (one for one in LEGENDS[self.style] if one not in absent):
            self.write(MARKS[origin].meaning, origin)
            click.echo(f"{self._change_to(NO_MARK)}   ", nl=False, color=True)
        click.echo("", nl=self.style != "plain")

    def _change_to(self, mark: TextMark) -> str:
        """Return the text that ends the last mark and begins another one."""
        before, self._mark = self._mark, mark
        if self.style == "colours":
            return "" if before.colour == mark.colour else _colour(mark.colour)
        same = (before.opening, before.closing) == (mark.opening, mark.closing)
        return "" if same else f"{before.closing}{mark.opening}"


def _colour(name: str | None) -> str:
    """Return the code for this colour on a terminal; None means the terminal's own."""
    reset = click.style("")
    return reset + click.style("", fg=name, reset=False) if name else reset


def pen_for(stream: TextIO = sys.stdout, *, otherwise: str = "plain") -> Pen:
    """Return a pen for a stream.

    The pen uses colours on a terminal with colours, and marks on one without. For a file or pipe it uses `otherwise`.
    """
    if not stream.isatty():
        return Pen(otherwise)
    return Pen("colours" if wants_colours() else "marks")


def summary(result: Result) -> str:
    """Return one completion's rounds, accepted drafts and rate."""
    stats = result.stats
    return (
        f"{len(result.token_ids)} tokens in {stats['rounds']} rounds, {_drafts(result)}, "
        f"{stats['tokens_per_second']:.0f} tokens/s"
    )


def _drafts(result: Result) -> str:
    accepted, drafted = result.stats["accepted_tokens"], result.stats["draft_tokens"]
    if not drafted:
        return "nothing drafted"
    return f"{accepted} of {drafted} checked drafts accepted ({result.stats['acceptance_rate']:.0%})"

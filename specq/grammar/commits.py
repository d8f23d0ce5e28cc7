"""The commits of a step: grammars follow tokens of their transcripts, and other threads begin the next masks."""

from __future__ import annotations

from collections.abc import Sequence

from specq.grammar.mask_rows import MaskRows, executor, num_threads
from specq.grammar.session_grammar import SessionGrammar
from specq.protocol import EngineError

MANY = 32  # grammars, from which to wake threads takes less time than they save


def commit_each(grammars: Sequence[SessionGrammar], texts: Sequence[list[int]]) -> list[int | Exception]:
    """Let each grammar follow its tokens. Return what `SessionGrammar.commit` returns or raises."""
    found = dict[int, int | Exception]()
    if len(grammars) >= MANY and num_threads() > 1:
        pairs = enumerate(zip(grammars, texts, strict=True))
        single = [i for i, (grammar, text) in pairs if len(text) == 1 and not grammar.is_end(text[0])]
        found = _commit_single(grammars, texts, single)
    return [found[i] if i in found else _commit(*one) for i, one in enumerate(zip(grammars, texts, strict=True))]


def _commit(grammar: SessionGrammar, token_ids: list[int]) -> int | Exception:
    try:
        return grammar.commit(token_ids)
    except Exception as error:  # noqa: BLE001 - a fault of this session alone
        return error


def _commit_single(
    grammars: Sequence[SessionGrammar], texts: Sequence[list[int]], which: list[int]
) -> dict[int, int | Exception]:
    """Follow one token of each, in several threads and without Python's lock."""
    are_allowed = executor().consume_token_par([(grammars[i].matcher, texts[i][0]) for i in which])
    found: dict[int, int | Exception] = dict.fromkeys(which, 1)
    for i, is_allowed in zip(which, are_allowed, strict=True):
        try:
            grammars[i].note_commit(texts[i][0], is_allowed=is_allowed)
        except EngineError as error:
            found[i] = error
    return found


def begin_masks(grammars: Sequence[SessionGrammar], *, waits: bool = True) -> None:
    """Let other threads compute the masks behind the transcripts. The step that needs them finds them.

    waits  whether to wait until they have begun. Else they begin when this thread gives up Python's lock.

    A step computes only the masks behind drafts then, of sessions that have some. Watched grammars are left out: their
    masks are timed one by one.
    """
    some = [grammar for grammar in grammars if not grammar.is_watched]
    if not some:
        return
    rows = MaskRows(len(some), some[0].num_words)
    rows.begin([(grammar.matcher, row) for row, grammar in enumerate(some)], waits=waits)
    for row, grammar in enumerate(some):
        grammar.lend(rows, row)

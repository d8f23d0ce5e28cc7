"""The masks of a step's sessions, for the judge.

The masks behind the transcripts were begun when these were committed (`commits`). The masks behind drafts are computed
when the judge asks for them. One call computes those of all sessions whose drafts are chains, in several threads and
without Python's lock. Trees are walked one by one.

A grammar whose masks take too long is ended. A step with slow masks makes the grammars *watched*: their next masks are
computed and timed one by one. A grammar that is slow MOST_SLOW times fails its session.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specq.grammar.mask_rows import MaskRows
from specq.grammar.session_grammar import SessionGrammar
from specq.protocol import NO_TREE, Int32Array, IntpArray
from specq.verification import JudgedSteps, MaskedSteps, TokenMasks, ends_of

if TYPE_CHECKING:
    from specq.grammar.mask_rows import Chain, Plain

SLOW_MASK_S, SLOW_ROW_S = 0.01, 0.0025  # CPU time of one session's first mask, and of each further row
MOST_SLOW = 3
TOO_SLOW = f"its masks take longer than {SLOW_MASK_S * 1e3:.0f} ms"  # why such a grammar is ended
FEW = 16  # fewer masks take longer to hand to threads than to compute

Complete = list[bool | None]  # of each row, as `SessionGrammar.fill` returns them


class StepMasks(TokenMasks):
    """The masks of sessions with these grammars, by session id, in one step.

    They follow the transcripts as these are when the judge asks. That is after the step before has been committed, and
    before this one is.
    """

    def __init__(self, grammars: Mapping[int, SessionGrammar]) -> None:
        self._grammars = grammars
        self._whole: tuple[list[int], MaskedSteps] | None = None  # of all sessions of the step
        self._rows: MaskRows | None = None  # whose memory `_whole` uses
        self._reasons: dict[int, str] = {}

    def of(self, judged: JudgedSteps) -> MaskedSteps:
        """See `TokenMasks`."""
        if self._whole is None:
            self._whole = judged.session_ids, self._computed(judged)
        session_ids, found = self._whole
        if session_ids == judged.session_ids:
            return found
        known = {session_ids[place]: words for place, words in found.each()}
        return MaskedSteps.of({i: known[own] for i, own in enumerate(judged.session_ids) if own in known})

    def reason(self, session_id: int) -> str:
        """See `TokenMasks`."""
        return self._reasons.get(session_id, "")

    def _computed(self, judged: JudgedSteps) -> MaskedSteps:
        ids, known = judged.session_ids, self._grammars
        where = [i for i, own in enumerate(ids) if own in known]
        grammars, places = [known[ids[i]] for i in where], np.array(where, np.intp)
        counts = judged.num_nodes[places] + 1
        num_rows = int(counts.sum())
        matchers = [grammar.matcher for grammar in grammars]  # which are no longer lent
        rows = _ahead_of(grammars) if num_rows == len(places) else None
        if rows is not None:
            are_complete: Complete = [matcher.is_accepting() for matcher in matchers]
        else:
            rows = MaskRows(num_rows, grammars[0].num_words if grammars else 0)
            are_complete = _fill(judged, places, grammars, counts, rows)
        self._rows = rows
        if rows.is_slow:
            for grammar in grammars:
                grammar.is_watched = True
        close(grammars, counts, are_complete, rows.words)
        found = MaskedSteps(places, counts, rows.words)
        if any(matcher.is_error() for matcher in matchers) or any(grammar.failure for grammar in grammars):
            for grammar, (place, words) in zip(grammars, found.each(), strict=True):
                if reason := grammar.reason():
                    self._reasons[judged.session_ids[place]] = reason
                    words[:] = 0
        return found


def _ahead_of(grammars: Sequence[SessionGrammar]) -> MaskRows | None:
    """Return the masks behind these transcripts, if exactly these were computed ahead, in this order."""
    rows = grammars[0].ahead if grammars else None
    if rows is None or len(rows.words) != len(grammars):
        return None
    if not all(grammar.ahead is rows and grammar.row == row for row, grammar in enumerate(grammars)):
        return None
    return rows


def _fill(
    judged: JudgedSteps, places: IntpArray, grammars: Sequence[SessionGrammar], counts: IntpArray, rows: MaskRows
) -> Complete:
    """Write the masks of all sessions, without what ends their texts. Return which rows are complete."""
    plain: list[Plain] = []
    chains: list[Chain] = []
    found: Complete = []
    words = rows.words
    if len(words) > len(places):
        words.fill(-1)
    ends, are_few = ends_of(counts).tolist(), len(words) < FEW
    for place, grammar, first, end in zip(places.tolist(), grammars, [0, *ends], ends, strict=False):
        is_alone, is_timed = end - first == 1, are_few or grammar.is_watched
        matcher, ahead = grammar.matcher, grammar.ahead
        rows.is_slow |= ahead is not None and ahead.is_slow
        if is_alone and not is_timed and ahead is None:
            found.append(grammar.is_complete)
            plain.append((matcher, first))
            continue
        tree = NO_TREE if is_alone else judged[place].tree
        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        if is_alone or is_timed or parents != list(range(-1, len(parents) - 1)):
            found += _timed(grammar, token_ids, parents, words[first:end])
            continue
        found += grammar.fill(token_ids, parents)
        if chain := grammar.chain(token_ids):
            chains.append((matcher, first, chain))
        else:
            plain.append((matcher, first))
    rows.compute(plain, chains)
    return found


def _timed(grammar: SessionGrammar, token_ids: Sequence[int], parents: Sequence[int], words: Int32Array) -> Complete:
    """Write the masks of one session, and note whether they took long."""
    started = time.thread_time()
    found = grammar.fill(token_ids, parents, words)
    if time.thread_time() - started > SLOW_MASK_S + SLOW_ROW_S * len(parents):  # drafts must not fail a session
        grammar.num_slow += 1
    else:
        grammar.is_watched = False
    if grammar.num_slow > MOST_SLOW:
        grammar.fail(TOO_SLOW)
    return found


def close(grammars: Sequence[SessionGrammar], counts: IntpArray, are_complete: Complete, words: Int32Array) -> None:
    """Allow what ends a session's text in the rows that are complete, and no end elsewhere.

    Rows that a grammar does not reach allow everything, so that other parameters leave something too.

    counts        the number of rows of each session.
    are_complete  of each row; None: not reached.
    """
    kinds = {id(grammar.ends): grammar.ends for grammar in grammars}
    if len(kinds) == 1:
        grammars[0].ends.put(words, are_complete)
    else:
        of_rows = np.array([id(grammar.ends) for grammar in grammars]).repeat(counts)
        for kind, ends in kinds.items():
            which = (of_rows == kind).nonzero()[0]
            own = words[which]
            ends.put(own, [are_complete[i] for i in which.tolist()])
            words[which] = own
    if None in are_complete:
        words[np.array([one is None for one in are_complete])] = -1

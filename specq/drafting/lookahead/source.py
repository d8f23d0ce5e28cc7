"""Lookahead decoding (arXiv 2402.02057): the target itself makes n-grams for later positions, in rows of its own steps.

Beside each next token the step computes a window of guesses (`LookaheadWindow`): W columns, one for each of the next
positions, with N - 1 tokens each, one a level. The target's output after the last level gives each column one more
token. Then the column has N successive tokens, an n-gram for the session's pool. N-grams that begin with the session's
last token are its drafts, at most G. No draft model or training is needed. The price is W * (N - 1) rows in each step,
and a row for each node of the drafts.

Rows are free as long as a step waits for the weights anyway. So the window is as wide as the step curve allows for
free, at most W. If no row is free, the window is empty. The controller measures whether the rest pays off
(`specq.verifier.control.policy`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specq.drafting.grammar.leads import Leads, leads_of
from specq.drafting.suffix import TextDrafts
from specq.drafting.suffix.text_drafts import batches_of_texts, most_depth
from specq.protocol import LOOKAHEAD, LOOKAHEAD_LANE, NO_SCRATCH, Int32Array, ModelInfo, ScratchRows
from specq.runtime import Faults
from specq.verifier.sources import Budget, ComputedDrafts, DraftBatch, DraftSource, Round, Session, Setup, StepCurve

MOST_FIRSTS = 4096  # first tokens of a session's n-grams; beyond this the oldest is forgotten
WIDER = 2  # A window starts from scratch when it widens, so this many times its columns must be free before.
# The newest n-gram's first token has the probability FIRST / 1, the one before FIRST / 2, and so on. Each further token
# has NEXT. The lane's calibration corrects them.
FIRST, NEXT = 0.5, 0.7


class Ngrams(NamedTuple):
    """A tree of tokens, parents before children.

    It has the indices of their parents (-1: the context), and their scores.
    """

    token_ids: list[int]
    parents: list[int]
    scores: list[float]


class LookaheadWindow:
    """The guesses of one session, and its pool of n-grams.

    It has at most `ngram` - 1 `levels`, with `num_columns` tokens each.
    """

    def __init__(self, ngram: int, guesses: int) -> None:
        self.ngram, self.guesses = ngram, guesses
        self.levels: list[list[int]] = []
        self.pool: dict[int, list[tuple[int, ...]]] = {}  # first token -> what followed it, newest first
        self.asked: Int32Array | None = None  # the tokens of the requested rows

    @property
    def num_columns(self) -> int:
        return len(self.levels[0]) if self.levels else 0

    def rows(self, token_ids: Sequence[int], num_columns: int) -> ScratchRows:
        """Return a text's window as scratch rows, `num_columns` wide, one level after the other.

        The first level is a chain. Each token of another level follows the one above it. So a token sees its own
        column, and the first tokens of all columns before.
        """
        self._resize(token_ids, num_columns)
        width, base = self.num_columns, len(token_ids)
        self.asked = np.array(self.levels, np.int32).reshape(-1)
        parents = np.arange(-width, len(self.asked) - width, dtype=np.int32)
        parents[:width] = np.arange(-1, width - 1)
        places = np.arange(width) + np.arange(len(self.levels))[:, None]  # [levels, width]
        return ScratchRows(self.asked, parents, (base + places).astype(np.int32).reshape(-1))

    def _resize(self, token_ids: Sequence[int], num_columns: int) -> None:
        """Start with tokens of the text, or remove columns."""
        if not self.levels or num_columns >= WIDER * self.num_columns:
            tokens = list(token_ids[-num_columns:])
            self.levels = [(tokens * num_columns)[:num_columns]]
        self.levels = [level[:num_columns] for level in self.levels]

    def learn(self, following: Sequence[int]) -> None:
        """Store the target's output after each requested row."""
        width, self.asked = self.num_columns, None
        found = list(following[-width:])
        if len(self.levels) == self.ngram - 1:
            for first, *rest in zip(*self.levels, found, strict=True):
                self._keep(first, tuple(rest))
            self.levels.pop(0)
        self.levels.append(found)

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        known = self.pool.pop(first, [])
        self.pool[first] = [rest, *(other for other in known if other != rest)][: max(self.guesses, 1)]
        if len(self.pool) > MOST_FIRSTS:
            del self.pool[next(iter(self.pool))]

    def drafts(self, last: int, max_depth: int, max_nodes: int) -> Ngrams:
        """Return the n-grams that begin with the last token, as a tree."""
        drafted, places = Ngrams([], [], []), dict[tuple[int, ...], int]()
        for rank, tokens in enumerate(self.pool.get(last, ())[: self.guesses]):
            for depth in range(min(len(tokens), max_depth)):
                path = tokens[: depth + 1]
                if path in places or len(places) == max_nodes:
                    continue
                places[path] = len(places)
                drafted.token_ids.append(tokens[depth])
                drafted.parents.append(places.get(path[:-1], -1))
                drafted.scores.append(math.log(NEXT if depth else FIRST / (1 + rank)))
        return drafted


FREE = 0.1  # share of a step's time by which all windows together may lengthen it
MOST_NODES = 64  # of a session's drafts


class SessionLookahead:
    """The window of one session, and which of its n-grams are drafted."""

    def __init__(self, session: Session, ngram: int, guesses: int) -> None:
        self.window = LookaheadWindow(ngram, guesses)
        self._max_depth = most_depth(session, ngram - 1)
        self._max_nodes = min(session.speculation.max_nodes or MOST_NODES, MOST_NODES)

    def draft(self, session: Session, lead: Sequence[int]) -> Ngrams:
        """Return n-grams that begin with the last token, or with the last that is forced behind it."""
        room = min(self._max_depth, session.limit - session.length - len(lead) - 1)
        return self.window.drafts([*session.token_ids[-1:], *lead][-1], room, self._max_nodes)


class LookaheadDecoder(DraftSource):
    """The windows of all sessions.

    window, ngram, guesses   W, N and G. A G of 0 means W.
    is_adaptive              False: windows always have W columns.
    """

    name = LOOKAHEAD
    takes_sync = False
    uses_scratch = True

    def __init__(self, info: ModelInfo, *, window: int, ngram: int, guesses: int = 0, is_adaptive: bool = True) -> None:
        self.width, self.ngram, self.guesses, self.is_adaptive = window, ngram, guesses or window, is_adaptive
        self._num_tokens, self._end = info.num_tokens, min(info.max_length, info.kv_slots or info.max_length)
        self._num_columns = 0  # of each session in the next step
        self._sessions: dict[int, SessionLookahead | None] = {}  # None: no drafts for this session

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return n-grams of the sessions. A session that raises an exception is left out from then on."""
        self._num_columns = self.free_columns(len(sessions), budget.curve) if self.is_adaptive else self.width
        found: list[tuple[Session, Ngrams]] = []
        faults, leads = Faults(), leads_of(sessions, budget)
        for session in sessions:
            with faults.of(session, "drafted for"):
                own = self._of(session)
                drafted = own and own.draft(session, leads.of(session))
                if drafted and drafted.token_ids:
                    found.append((session, drafted))
            if faults.found and session in faults:
                self.refuse(session)
        return _batches(found, budget.min_accept_prob, leads) if found else ()

    def free_columns(self, num_sessions: int, curve: StepCurve) -> int:
        """Return how many columns, at most W, each session may have so that their rows are free."""
        most = (1 + FREE) * curve(num_sessions)
        rows = num_sessions * (self.ngram - 1)
        return next(
            (columns for columns in range(self.width, 0, -1) if curve(num_sessions + columns * rows) <= most), 0
        )

    def scratch(self, session: Session) -> ScratchRows:
        """Return the session's window, if it has one that fits below the maximum length."""
        own = self._sessions.get(session.session_id)
        end = session.length + self._num_columns + self.ngram - 2
        if own is None or not self._num_columns or end > min(session.limit, self._end):
            return NO_SCRATCH
        return own.window.rows(session.token_ids, self._num_columns)

    def observe(self, rounds: Sequence[Round], computed: Sequence[ComputedDrafts]) -> None:
        """Give the windows the target's output after their rows."""
        for shares, output in computed:
            if output.scratch_logits is None:
                continue
            said = output.scratch_logits.values[:, : self._num_tokens].argmax(-1).tolist()
            starts = output.scratch_logits.starts.tolist()
            for share, start, end in zip(shares, starts, starts[1:], strict=False):
                own = self._sessions.get(share.session_id)
                if own is not None and share.step.scratch.token_ids is own.window.asked:
                    own.window.learn(said[start:end])

    def _of(self, session: Session) -> SessionLookahead | None:
        if session.session_id not in self._sessions:
            takes_drafts = most_depth(session, self.ngram - 1) > 0
            self._sessions[session.session_id] = (
                SessionLookahead(session, self.ngram, self.guesses) if takes_drafts else None
            )
        return self._sessions[session.session_id]

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self._sessions[session.session_id] = None

    def close(self, session: Session) -> None:
        """Forget a session's window."""
        self._sessions.pop(session.session_id, None)


def _batches(found: Sequence[tuple[Session, Ngrams]], min_accept_prob: float, leads: Leads) -> Sequence[DraftBatch]:
    """Return batches with the n-grams of some sessions."""
    sessions, drafted = zip(*found, strict=True)
    drafts = TextDrafts(
        sizes=np.array([len(own.token_ids) for own in drafted], np.int32),
        token_ids=np.array([token for own in drafted for token in own.token_ids], np.int32),
        parents=np.array([parent for own in drafted for parent in own.parents], np.int32),
        scores=np.array([score for own in drafted for score in own.scores], np.float64),
    )
    return batches_of_texts(sessions, LOOKAHEAD_LANE, drafts, min_accept_prob, leads)


def make(setup: Setup) -> LookaheadDecoder | None:
    """Return the windows of a verifier with lookahead decoding; None without it."""
    config = setup.config
    if not config.lookahead:
        return None
    return LookaheadDecoder(
        setup.info,
        window=config.lookahead_window,
        ngram=config.lookahead_ngram,
        guesses=config.lookahead_guesses,
        is_adaptive=config.drafts != "always",
    )

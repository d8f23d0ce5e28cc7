"""The interface of a source that drafts for a verifier's sessions.

The verifier calls each source twice in a step: `begin` before the host sends and receives, `collect` when the step is
planned. It grafts all collected drafts onto the sessions' draft trees. After the step each source observes the results.

Rules: drafts are hints. A source never commits tokens. Drafts that it has not collected in time have no effect. If it
raises an error other than EngineLostError, only drafts are lost. Its context of a session follows the session's rounds,
and `close` ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from specq.config import TargetConfig
from specq.protocol import NO_DRAFTS, NO_SCRATCH, ModelInfo, ScratchRows, SessionRows, StepOutput
from specq.verification import ends_of
from specq.verifier.control.choices import SourceTraits
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.token_yield import NUM_LEVELS
from specq.verifier.sessions.grafting import DraftBatch
from specq.verifier.sessions.session import Session
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import Rounds

UNBOUNDED = 1 << 30


class Budget(NamedTuple):
    """What a source may know of the next step.

    curve            the expected seconds of a step by its rows.
    min_accept_prob  the least cumulative acceptance probability at which it paid to verify a node in the last step.
    unread_vocab     tokens below this may be verified before the host has read them (`DraftBatch.drafted`). 0: none.
    max_rows         the most rows of a step without prompts.
    depth            levels to draft, for a source whose levels can be chosen (`DraftSource.levels_s`).
    promised         drafted tokens of all sources expected to be accepted in a session's round.
    is_unread        whether to graft drafts unread, for a source that has the choice (`DraftSource.may_be_unread`).
    has_forced       whether the forced tokens of grammars are drafted.
    """

    curve: StepCurve
    min_accept_prob: float
    unread_vocab: int = 0
    max_rows: int = UNBOUNDED
    depth: int = NUM_LEVELS
    promised: float = 0.0
    is_unread: bool = False
    has_forced: bool = False


class Setup(NamedTuple):
    """What a source is made from.

    config            the configuration of the verifier.
    info              its target model.
    model             the directory or hub name of the draft model. "": no draft model.
    device            where the engine computes, by the engine's name for it.
    `tell`            reports what is being done, for example a download.
    helper_cores      cores with one thread each that helps with the engine's steps.
    target            the directory, GGUF file or hub name of the target model.
    heads             the directory of Medusa heads, an EAGLE-3 head or a block drafter. "": no heads.
    draft_tokenizer   the directory or hub name of the draft model's tokenizer.
    own_levels        how many tokens a drafter of the engine itself drafts, which has the heads. 0: it has none.
    """

    config: TargetConfig
    info: ModelInfo
    model: str
    device: str
    tell: Callable[[str], object]
    helper_cores: tuple[int, ...] = ()
    target: str = ""
    heads: str = ""
    draft_tokenizer: str = ""
    own_levels: int = 0


class ComputedDrafts(NamedTuple):
    """The result of one engine call: the shares of some sessions, and their output in the same order."""

    shares: Shares
    output: StepOutput

    def of_layers(self, layers: tuple[int, ...]) -> ComputedDrafts:
        """Return the same with the hidden states of these layers only.

        If the step did not compute all of these layers, return it without hidden states.
        """
        hidden = self.output.hidden
        if hidden is None or hidden.layers in ((), layers):
            return self
        found = None
        if layers and set(layers) <= set(hidden.layers):
            found = SessionRows(hidden.columns(hidden.values, layers), hidden.starts, layers)
        return self._replace(output=replace(self.output, hidden=found))


class DraftSource(ABC):
    """A source of drafts, driven by one thread. Only `collect` must be written.

    name           its name in the table of sources, which the controller uses too.
    layers         layers of the target whose hidden states it receives after each step (see `Tap`).
    engine_drafts  how many tokens the engine's own drafter is to draft behind the next step (see `Tap`).
    uses_scratch   whether steps compute rows of its own (see `scratch`).
    takes_sync     whether it may draft for synchronous sessions.
    most_levels    the most levels that it drafts.
    may_be_unread  whether it can graft drafts unread if `Budget.is_unread` is set. Then it has a `level_size`.
    """

    name: ClassVar[str]
    layers: tuple[int, ...] = ()
    engine_drafts: int = NO_DRAFTS
    uses_scratch: ClassVar[bool] = False
    takes_sync: ClassVar[bool] = True
    most_levels: int = NUM_LEVELS
    may_be_unread: bool = False

    @property
    def levels_s(self) -> Callable[[int, int], float] | None:
        """(sessions, levels) -> seconds of a draft, for a source that drafts `Budget.depth` levels. None: unknown."""
        return None

    @property
    def level_size(self) -> Callable[[int], int] | None:
        """Sessions -> the most nodes of a level. None: unknown."""
        return None

    def traits(self, *, is_unread_possible: bool) -> SourceTraits:
        """Return what is known of the source before it drafts."""
        may_be_unread = self.may_be_unread and is_unread_possible
        return SourceTraits(self.name, self.levels_s, self.most_levels, may_be_unread, self.level_size)

    def among(self, sessions: Sequence[Session]) -> Sequence[Session]:
        """Return the sessions that it could draft for, by what their jobs ask for."""
        return sessions

    @property
    def has_work(self) -> bool:
        """Whether drafts wait to be collected. Then a step is due, even if no session runs."""
        return False

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Begin to draft for sessions that decode, if that pays; return whether `collect` will wait for the drafts."""
        return False

    @abstractmethod
    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the drafts. `sessions` decode and take part in the step. Drafts may be for any session."""

    def read(self, clock: Callable[[], float]) -> None:
        """Wait for drafts that were grafted unread, and put their tokens in place.

        Called once after such a `collect`, when the step has been launched. A draft that cannot be read becomes
        NO_TOKEN, and so is rejected.
        """
        raise NotImplementedError("this source cannot graft drafts before they are copied to the host")

    def scratch(self, session: Session) -> ScratchRows:
        """Return rows to compute beside the next token of a decoding session. They are not judged.

        The parent of a row is -1 or an earlier scratch row. If the step has no room for these rows, it leaves them out.
        """
        return NO_SCRATCH

    def wants_prompt(self, session: Session) -> bool:
        """Return whether the source needs the hidden states of a session's whole context, not only of judged rows."""
        return False

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:  # noqa: B027 - need not be written
        """Learn what a step committed to each session, and so the results of the drafts.

        `computed` has requested hidden states and scratch rows' logits, if the engine keeps them.
        """

    def refuse(self, session: Session) -> None:  # noqa: B027
        """Stop drafting for a session, because its drafts could not be used."""

    def close(self, session: Session) -> None:  # noqa: B027
        """Forget a session, whether the source knows it or not."""


Paths = dict[int, Sequence[int]]


class Followed(NamedTuple):
    """Tokens of a session's text from position `first` on, and for each of them the row of hidden states before it."""

    session_id: int
    first: int
    token_ids: Sequence[int]
    rows: Sequence[int]


def accepted_paths(rounds: Rounds) -> Paths:
    """Return by session the places of its accepted nodes among its verified ones. Sessions without any are left out."""
    accepted = rounds.is_accepted.nonzero()[0]
    if not len(accepted):
        return {}
    ends = ends_of(rounds.num_nodes)
    of_rounds = np.searchsorted(ends, accepted, side="right")
    places = (accepted - (ends - rounds.num_nodes)[of_rounds]).tolist()
    counts = np.bincount(of_rounds)
    which = counts.nonzero()[0]
    spans = counts[which].cumsum().tolist()
    ids = [rounds.sessions[i].session_id for i in which.tolist()]
    return {i: places[first:end] for i, first, end in zip(ids, [0, *spans], spans, strict=False)}


def followed_rows(
    part: ComputedDrafts, paths: Paths, takes: Callable[[Session], bool]
) -> Iterator[tuple[Session, Followed]]:
    """Yield for each text the tokens that follow its computed rows of hidden states.

    These are rows of the tokens that the step computed, and of the accepted path. `takes`: whether to follow a
    session's text. To be called after the step has been committed.
    """
    shares, hidden = part.shares, part.output.hidden
    if hidden is None:
        return
    batch = shares.batch
    counts = np.diff(hidden.starts) - batch.num_nodes  # rows of tokens
    firsts = batch.base_lens - counts + 1
    of_sessions = zip(shares.sessions, hidden.starts.tolist(), counts.tolist(), firsts.tolist(), strict=False)
    for session, start, count, first in of_sessions:
        if not takes(session):
            continue
        path, end = paths.get(session.session_id, ()), start + count
        token_ids = session.token_ids[first : first + count + len(path)]
        rows = [*range(start, end), *(end + node for node in path)]
        if len(token_ids) < len(rows):
            rows = rows[: len(token_ids)]
        if rows:
            yield session, Followed(session.session_id, first, token_ids, rows)

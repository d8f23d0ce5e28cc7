"""What a verifier needs of whatever drafts for its sessions.

Each step asks its sources twice: `begin` before the host sends and receives, `collect` when the step is planned. What
is collected is hung onto the sessions' draft trees, whoever drafted it, and after the step each source observes what
became of it.

Rules: drafts are hints. A source commits nothing; what it has not collected in time has no effect; what it raises, but
EngineLostError, costs its drafts and nothing else. Its context of a session follows the session's rounds; `close` ends
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import numpy as np

from specq.config import TargetConfig
from specq.protocol import NO_SCRATCH, ModelInfo, ScratchRows, SessionRows, StepOutput
from specq.verification import ends_of
from specq.verifier.control.choices import SourceTraits
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.token_yield import NUM_LEVELS
from specq.verifier.sessions.grafting import DraftBatch
from specq.verifier.sessions.session import Session
from specq.verifier.step.commit import Rounds
from specq.verifier.step.node_choice import Shares

UNBOUNDED = 1 << 30


class Budget(NamedTuple):
    """What a source may know of the next step.

    curve            the seconds that a step takes, by its rows
    min_accept_prob  the least cumulative acceptance probability with which verifying a node paid in the last step
    unread_vocab     drafted tokens below this may be verified before the host has read them (`DraftBatch.drafted`); 0:
                     none may
    max_rows         of a step without prompts
    depth            levels that a source drafts which drafts as many as it is told (`DraftSource.levels_s`)
    promised         tokens of a round that are expected of all that is drafted
    is_unread        whether drafts are hung unread where that may be chosen (`DraftSource.may_be_unread`)
    """

    curve: StepCurve
    min_accept_prob: float
    unread_vocab: int = 0
    max_rows: int = UNBOUNDED
    depth: int = NUM_LEVELS
    promised: float = 0.0
    is_unread: bool = False


class Setup(NamedTuple):
    """What a source is made of.

    config, info  of the verifier, and its target model
    model         the directory or hub name of the draft model; "" where none is asked for
    device        where the engine computes, as a process with that engine names it
    tell          says what is being done
    helper_cores  cores on each of which a thread helps with the engine's steps
    target        the directory, GGUF file or hub name of the target model
    heads         the directory of Medusa heads, or of an EAGLE-3 head; "" where none are asked for
    draft_tokenizer   the directory or hub name of the draft model's tokenizer
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


class ComputedDrafts(NamedTuple):
    """What the engine computed at one call: the shares of some sessions, and what it returned of them, in their
    order."""

    shares: Shares
    output: StepOutput

    def of_layers(self, layers: tuple[int, ...]) -> ComputedDrafts:
        """Return the same with the hidden states of these layers alone; without any where the step was not asked for
        all of them."""
        hidden = self.output.hidden
        if hidden is None or hidden.layers in ((), layers):
            return self
        found = None
        if layers and set(layers) <= set(hidden.layers):
            found = SessionRows(hidden.columns(hidden.values, layers), hidden.starts, layers)
        return self._replace(output=replace(self.output, hidden=found))


class DraftSource(ABC):
    """A source of drafts, driven by one thread. Only `collect` must be written.

    name          that of its table, by which the controller knows it
    layers        the layers of the target whose hidden states it is given after each step (see `Tap`)
    uses_scratch  whether it has rows of its own computed in steps; see `scratch`
    takes_sync    whether it may draft for synchronous sessions
    most_levels   levels that it drafts at most
    may_be_unread whether it may hang its drafts unread where `Budget.is_unread` says so; then it has a `level_size`
    """

    name: ClassVar[str]
    layers: tuple[int, ...] = ()
    uses_scratch: ClassVar[bool] = False
    takes_sync: ClassVar[bool] = True
    most_levels: int = NUM_LEVELS
    may_be_unread: bool = False

    @property
    def levels_s(self) -> Callable[[int, int], float] | None:
        """The seconds of a draft, given sessions and levels, of a source that drafts as many levels as it is told;
        None: nobody knows."""
        return None

    @property
    def level_size(self) -> Callable[[int], int] | None:
        """The most nodes of a level, given sessions; None: not known."""
        return None

    def traits(self, *, is_unread_possible: bool) -> SourceTraits:
        """Return what is known of it before it drafts."""
        may_be_unread = self.may_be_unread and is_unread_possible
        return SourceTraits(self.name, self.levels_s, self.most_levels, may_be_unread, self.level_size)

    @property
    def has_work(self) -> bool:
        """Whether something waits to be collected; then a step is due, even if no session runs."""
        return False

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Begin to draft for sessions that decode, if that pays; return whether `collect` will wait for it."""
        return False

    @abstractmethod
    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return what was drafted. `sessions` decode and take part in the step; drafts may be of any."""

    def read(self, clock: Callable[[], float]) -> None:
        """Wait for drafts that were hung unread, and put them in place; called once after such a `collect`, when the
        step was launched. What could not be read is no token, and so rejected."""
        raise NotImplementedError("this source cannot graft drafts before they are copied to the host")

    def scratch(self, session: Session) -> ScratchRows:
        """Return rows that shall be computed beside a decoding session's next token, which nobody judges; their parents
        are -1 or earlier ones of them. Where the step has no room for them, they are left out."""
        return NO_SCRATCH

    def wants_prompt(self, session: Session) -> bool:
        """Return whether hidden states are wanted of all rows of a session's context, not only of those that are
        judged."""
        return False

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:  # noqa: B027 - need not be written
        """Take in what a step committed to each session, and so what became of the drafts; `computed` has the hidden
        states and the logits of scratch rows that were asked for, where the engine keeps them."""

    def refuse(self, session: Session) -> None:  # noqa: B027
        """Draft no more for a session: its drafts could not be used."""

    def close(self, session: Session) -> None:  # noqa: B027
        """Forget a session, known or not."""


Paths = dict[int, Sequence[int]]


class Followed(NamedTuple):
    """Tokens of a session's text from position `first` on; before each stands one of these rows of hidden states."""

    session_id: int
    first: int
    token_ids: Sequence[int]
    rows: Sequence[int]


def accepted_paths(rounds: Rounds) -> Paths:
    """Return the places of the accepted nodes among the verified ones, by session; of sessions that had some."""
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
    """Yield what each text goes on with behind the rows of hidden states that were computed of it: of the tokens that
    the step computed, and of the accepted path. `takes`: whether a session's text is followed. To be asked after the
    step was committed."""
    shares, hidden = part.shares, part.output.hidden
    if hidden is None:
        return
    batch = shares.batch
    counts = np.diff(hidden.starts) - batch.num_nodes  # of tokens
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

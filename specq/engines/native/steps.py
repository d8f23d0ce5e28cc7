"""The steps of an engine over a KV pool and a forward: one packed forward pass per step for all sessions.

The KV pool (kv_pool.py) decides where KV is stored. A forward runs the rows. `specq.verification` decides which tokens
are accepted. A step changes the pool only after the forward pass and the judgement have succeeded. So a failed step can
be repeated with some of its sessions.

A step is complete when `launch` returns, unless the forward runs on a GPU (`specq.engines.torch.engine`). There it may
be launched before the last is collected (flights.py). The slots of its rows are known. Tokens that are not yet known
pass from step to step on the device. The device works in launch order. So a free slot may still be read or written by a
step in flight. The next user of the slot runs later on the device.

To add an engine of this kind, derive a class that loads a model. No module here imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specq.engines.checks import check_asked, check_steps, check_tokens
from specq.engines.interface import Launched
from specq.engines.native.compiler import built_kernels
from specq.engines.native.flights import Flight, Plan, Unread, tapped_rows
from specq.engines.native.forward import Threads
from specq.engines.native.kv_pool import KvPool
from specq.engines.native.loaded import ForwardOutput, LoadedModel
from specq.engines.native.rows import RowTap, pack_steps
from specq.engines.profiling import keep, one_row_step_s, recall, step_times_file
from specq.protocol import (
    FINAL,
    NO_TAP,
    BoolArray,
    ConfigError,
    Int32Array,
    IntpArray,
    SessionRows,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.runtime import processor
from specq.verification import Judgements, Logits, StepBatch, starts_of
from specq.verification.begun import Judging
from specq.verification.explain import log_decisions
from specq.verification.judge import judge_each
from specq.verification.logprobs import ScoredLogprobs

MOST_EXPECTED = 64  # rows; the times of larger steps are learned in service


class PooledEngine:
    """Fulfils `specq.engines.OverlappingEngine`, but does not overlap steps.

    - threads: the threads that compute.
    - verbose: log the decision on each draft node.
    """

    max_chain = 0
    takes_scratch = True
    scores_rows = takes_masks = True

    overlaps = False

    def __init__(self, loaded: LoadedModel, threads: Threads, *, verbose: bool = False) -> None:
        if loaded.token_ids is not None:
            raise ConfigError(f"{loaded.info.name} is a draft model with a reduced vocabulary; it cannot be a target")
        self.info = loaded.info
        self._forward = loaded.forward
        self.num_tap_layers, self.jumps = loaded.forward.num_tap_layers, loaded.forward.jumps
        self._pool = KvPool(self.info.kv_slots, may_copy=True)
        self._threads, self._is_helped = threads, loaded.forward.is_helped
        self._verbose, self._has_judged = verbose, False
        self.takes_unread = self.judges_late = True
        self._flights: list[Flight] = []
        self._collected: tuple[Flight, Judgements] | None = None  # a step that the pool has not committed yet

    @property
    def is_helped(self) -> bool:
        """Whether threads on `helper_cores` take part in steps; see `Engine.is_helped`."""
        return self._is_helped

    @is_helped.setter
    def is_helped(self, is_helped: bool) -> None:
        self._is_helped = self._forward.is_helped = is_helped

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session; see `Engine.open`."""
        self.tidy()
        return self._pool.open(session_id, token_ids, owner)

    def close(self, session_id: int) -> None:
        """End a session; see `Engine.close`."""
        self.tidy()
        for flight in self._flights:
            flight.closed.add(session_id)
        self._pool.close(session_id)

    @property
    def free_slots(self) -> int:
        self.tidy()
        return self._pool.free_slots

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Run and judge one packed forward pass; see `Engine.step`."""
        return self._collect(self.launch(steps, tap))

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> Flight:
        """Begin a step; see `OverlappingEngine.launch`."""
        batch = StepBatch.of(steps)
        check_asked(self, batch, tap)
        assert after is None or isinstance(after, Flight)
        self.tidy()
        for before in self._flights:
            self._hold(before)
        if batch.fed_by is not None and after is not None and after.tokens is not None:
            batch = batch.fed(after.tokens[batch.fed_by])
        batch = batch.as_read()
        if (copies := self._pool.copies()).size:
            self._forward.kv.copy(copies)
            self._pool.note_copied()  # if the copy raises, the next step repeats it
        plan = self._plan(batch)
        try:
            unread = Unread.of(plan)
            check_tokens(plan.rows.token_ids, batch, self.info)
            output, hidden = self._run(plan, tap, self._feed(batch, unread, after))
            logits, scratch_logits, scored = _set_apart(output.logits, batch)
            is_late = batch.masks is not None and batch.fed_by is not None
            judging, judge_s = (None, 0.0) if is_late else self._judge(batch, logits)
            if not self._has_judged and len(logits):
                self._has_judged = True
                self._prepare_judging(logits)
        except BaseException:
            self._pool.give(plan.slots)
            self._check_alive()
            raise
        rest = StepOutput((), hidden, scratch_logits, judge_s)
        kept = logits if self._verbose or is_late else None
        flight = Flight(plan, judging, rest, after, self._collect, self._discard, kept, unread, scored)
        self._flights.append(flight)
        return flight

    def _judge(self, batch: StepBatch, logits: Logits) -> tuple[Judging | Judgements, float]:
        """Judge the step. Returns the seconds, if judging can be measured by itself."""
        started = time.perf_counter()
        return judge_each(batch, logits), time.perf_counter() - started

    def _feed(self, batch: StepBatch, unread: Unread | None, after: Flight | None) -> dict[str, Any]:
        """Return the arguments of the forward pass for tokens that only a device knows."""
        return {}

    def _prepare_judging(self, logits: Logits) -> None:
        """Prepare to judge such logits, before the first judgement."""

    def _check_alive(self) -> None:
        """Raise EngineLostError if the device has failed."""

    def _run(self, plan: Plan, tap: Tap, feed: dict[str, Any]) -> tuple[ForwardOutput, SessionRows | None]:
        """Run the forward pass; return its output and the requested hidden states. `feed`: see `feed_of`."""
        if not tap.layers:
            return self._forward(plan.rows, **feed), None
        rows, starts = tapped_rows(plan.batch, tap)
        if tap.layers == (FINAL,) and not tap.chunks:  # the head reads these states in any case
            output = self._forward(plan.rows, **feed)
            return output, SessionRows(output.hidden[: len(rows)], starts, tap.layers)
        output = self._forward(plan.rows, RowTap(tap.layers, rows), **feed)
        return output, SessionRows(output.tapped, starts, tap.layers)

    def _collect(self, flight: Flight) -> StepOutput:
        """Wait for the oldest step in flight; see `Launched.collect`."""
        assert flight is self._flights[0]
        self.tidy()
        try:
            flight.judge()
            judging = flight.judging
            assert judging is not None
            judgements = judging if isinstance(judging, Judgements) else judging.finish()
        except BaseException:
            self._discard(flight)
            self._check_alive()
            raise
        self._end(flight)
        if flight.is_held:
            flight.know(judgements)
        self._collected = flight, judgements
        if not self.overlaps:
            self.tidy()
        batch = flight.plan.batch
        # Profiling steps have negative ids.
        if self._verbose and flight.logits is not None and batch.session_ids[0] >= 0:
            log_decisions(batch.known(), flight.logits, judgements)
        rest, scored = flight.output, {} if flight.scored is None else flight.scored.wait()
        return StepOutput(judgements, rest.hidden, rest.scratch_logits, rest.judge_s, scored)

    def tidy(self) -> None:
        """Commit the last collected step to the pool, if that is still pending; see `specq.engines.tidy`."""
        if self._collected is not None:
            (flight, judgements), self._collected = self._collected, None
            flight.learn_fed()
            self._commit(flight, judgements)

    def _discard(self, flight: Flight) -> None:
        """Forget a step; see `Launched.discard`."""
        self.tidy()
        self._end(flight)
        self._pool.give(flight.plan.slots)

    def _hold(self, flight: Flight) -> None:
        """Reserve the places of a step in flight, so that the next step follows it. A CPU already knows its tokens."""
        if flight.is_held:
            return
        flight.is_held = True
        if isinstance(flight.judging, Judgements):
            flight.know(flight.judging)
        self._pool.hold(*_staged(flight))

    def _end(self, flight: Flight) -> None:
        """Remove a step from the steps in flight."""
        self._flights.remove(flight)
        if flight.is_held:
            self._pool.release(*_staged(flight))

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Return the times that an earlier process learned in service, else estimates; see `Engine.step_times`."""
        one_row_s = one_row_step_s(self)
        sizes, recalled = [size for size in sizes if size <= MOST_EXPECTED], recall(self._times_file())
        if recalled.keys() >= {*sizes}:
            return [recalled[size] for size in sizes]
        return self._forward.work.seconds(sizes, self._threads_now.count, one_row_s)

    def keep_times(self, times: Mapping[int, float]) -> None:
        """Keep times for a later process; see `specq.engines.keep_times`."""
        keep(self._times_file(), {size: seconds for size, seconds in times.items() if size <= MOST_EXPECTED})

    @property
    def _threads_now(self) -> Threads:
        return self._threads if self.is_helped else self._threads.own_only

    def _times_file(self) -> Path:
        """Return the cache file of step times for the threads that take part now."""
        about = self.info.fingerprint, self.info.dtype, self._threads_now, type(self._forward).__name__
        return step_times_file(processor(), *about, built_kernels())

    def shutdown(self) -> None:
        """Do nothing: all resources end with the process."""

    def _plan(self, batch: StepBatch) -> Plan:
        """Check the steps, take their slots and lay out their rows. An error leaves the state unchanged."""
        places = self._pool.places(batch.session_ids)
        check_steps(batch, self._pool.lengths(places), self.info)
        slots = self._pool.take(len(batch) if batch.is_plain else int(batch.num_rows.sum()))
        try:
            is_token = slice(None) if batch.is_plain else _is_token(batch)
            staged = self._pool.stage_all(places, batch.num_tokens, slots[is_token])
            return Plan(batch, places, slots, staged, is_token, pack_steps(batch, slots, self._pool.tables(places)))
        except BaseException:
            self._pool.give(slots)
            raise

    def _commit(self, flight: Flight, judgements: Judgements) -> None:
        """Append each session's chain and accepted path to its table; free the other rows' slots."""
        plan, is_kept = flight.plan, flight.plan.is_token
        batch, token_ids, slots = plan.batch, plan.rows.token_ids, plan.slots
        if (
            isinstance(is_kept, slice) and not flight.is_held and not flight.closed
        ):  # all rows are tokens and were staged in place
            self._pool.extend_all(plan.places, batch.num_tokens, plan.staged, token_ids)
            return
        is_kept = np.ones(len(slots), np.bool_) if isinstance(is_kept, slice) else is_kept
        counts = batch.num_tokens.copy()
        num_tokens, judged = judgements.num_tokens, slice(None) if batch.are_judged else batch.is_judged
        first_nodes = (batch.first_rows + batch.num_tokens)[judged]
        is_kept[(first_nodes.repeat(num_tokens) + judgements.nodes)[judgements.nodes >= 0]] = True
        counts[judged] += num_tokens - (num_tokens > 0)
        places = plan.places
        if flight.closed:
            is_open = flight.is_open()
            is_kept &= is_open.repeat(batch.num_rows)
            places, counts = places[is_open], counts[is_open]
        self._pool.append_all(places, counts, token_ids[is_kept], slots[is_kept])
        self._pool.give(slots[~is_kept])


def _staged(flight: Flight) -> tuple[IntpArray, IntpArray]:
    """Return the places of a step's open sessions, and each one's number of tokens."""
    plan = flight.plan
    if not flight.closed:
        return plan.places, plan.batch.num_tokens
    is_open = flight.is_open()
    return plan.places[is_open], plan.batch.num_tokens[is_open]


def _is_token(batch: StepBatch) -> BoolArray:
    """Return bool[rows]: which rows are committed tokens, neither nodes nor scratch rows."""
    if not batch.has_scratch:
        return ~batch.is_node
    sizes = batch.num_rows
    firsts = starts_of(sizes)
    found: BoolArray = np.arange(sizes.sum()) < (firsts + batch.num_tokens).repeat(sizes)
    return found


def _set_apart(logits: Logits, batch: StepBatch) -> tuple[Logits, SessionRows | None, ScoredLogprobs | None]:
    """Return the logits of the judged rows, those of the scratch rows, and log-probabilities of the scored rows."""
    scored = None
    if batch.extras and (asked := batch.scored):
        first = len(logits) - sum(rows.num_rows for rows in asked.values())
        logits, scored = logits[:first], ScoredLogprobs(asked, logits[first:])
    if not batch.has_scratch:
        return logits, None, scored
    starts = np.cumsum([0, *(batch.num_rows - batch.sizes)], dtype=np.int32)
    num_judged = len(logits) - int(starts[-1])
    return logits[:num_judged], SessionRows(logits[num_judged:], starts), scored

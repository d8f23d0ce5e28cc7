"""Sessions in vLLM: each is one long-lived request of an engine core in this process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import structlog
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from specq.engines.room import BLOCKS_AHEAD, Slacks, free_slots, next_to_grow
from specq.engines.vllm.flights import Members, SessionFlight
from specq.engines.vllm.padding import MIXED, even_length, row_counts
from specq.engines.vllm.patches.scheduler import Holding, SessionScheduler
from specq.engines.vllm.step_delta import StepDelta
from specq.engines.vllm.table import SessionTable
from specq.engines.vllm.workers import Workers, executor_of
from specq.protocol import (
    NO_DRAFTS,
    BoolArray,
    ConfigError,
    EngineError,
    EngineLostError,
    Int32Array,
    IntpArray,
    StepOutput,
)
from specq.protocol import SamplingParams as JobParams
from specq.verification import DeviceTokens, Judgements, StepBatch, TokenMasks
from specq.verification.begun import says_own

log = structlog.get_logger(__name__)

MAX_CHAIN = 16
OPTIONS = {
    "scheduler_cls": "specq.engines.vllm.patches.scheduler.SessionScheduler",
    "worker_extension_cls": "specq.engines.vllm.worker.JudgingWorker",
    "async_scheduling": False,  # vLLM's scheduler is never called; see `executor_of`
}
# Attention on latent vectors computes more than one token of a session like a prompt, unless it expects drafts. Where
# it does not need this setting, vLLM gets none. Otherwise vLLM would capture whole CUDA graphs only for steps of
# MAX_CHAIN + 1 rows per session.
DRAFTS = {
    "method": "custom_class",
    "model": "specq.engines.vllm.worker.NoProposer",
    "num_speculative_tokens": MAX_CHAIN,
}


def engine_config(options: dict[str, Any]) -> VllmConfig:
    """Return vLLM's configuration for these arguments of `EngineArgs`."""
    config = EngineArgs(**options, **OPTIONS).create_engine_config()
    if not config.model_config.use_mla or config.speculative_config is not None:
        return config
    return EngineArgs(**options, **OPTIONS, speculative_config=DRAFTS).create_engine_config()


def leave_groups() -> None:
    """Leave torch's process groups, so that torch prints no warning at any process exit."""
    destroy_model_parallel()
    destroy_distributed_environment()


class Sessions:
    """Sessions as requests; made with the arguments of `EngineArgs`. `open` to `free_slots` as in `Engine`.

    - even_chains: as in `specq.engines.even_chains`.
    - is_apart: whether workers have their own processes.
    - has_graphs: whether there are graphs for steps with more than one row per session.
    """

    max_chain = MAX_CHAIN

    def __init__(self, options: dict[str, Any], *, verbose: bool) -> None:
        atexit.register(leave_groups)
        config = engine_config(options)
        self._has_lost = False
        self._core = EngineCore(config, executor_of(config), log_stats=False, executor_fail_callback=self._lose)
        self._workers = Workers(self._core.model_executor)
        self.is_apart, began = self._workers.are_apart, time.monotonic()
        installed = self._workers.install(verbose)
        self.overlaps, graphs, num_bytes = installed[0]
        drafted_with = config.speculative_config
        self.own_levels = drafted_with.num_speculative_tokens if "speculative_config" in options else 0
        # Draft tokens on the device belong to this process. Other processes receive them.
        self.takes_unread = self.overlaps and (self._workers.late is not None or not self._workers.are_apart)
        # If there are several devices, one may have had no memory for some graphs.
        captured = [own for _, own, _ in installed]
        graphs = {
            length: counts for length, counts in graphs.items() if all(own.get(length) == counts for own in captured)
        }
        if left_out := set().union(*captured) - graphs.keys():
            self._workers.leave_out(sorted(left_out))
        self._graphs = {length: counts for length, counts in graphs.items() if length != MIXED}
        self.has_graphs = bool(graphs)
        self.even_chains = {length - 1: counts[-1] for length, counts in self._graphs.items()}
        if graphs:
            log.info(
                "vllm_graphs_captured",
                rows_each=[*graphs],
                num=sum(map(len, graphs.values())),
                seconds=round(time.monotonic() - began, 1),
                mib=num_bytes >> 20,
            )
        self._scheduler: SessionScheduler = self._core.scheduler
        self._check()
        self._table = SessionTable()
        self._held: dict[int, Holding] = {}  # by place
        self._numbers = count()  # a session that is opened again is another request
        self._newest: SessionFlight | None = None  # the base of the next delta
        self._slacks: Slacks | None = None  # of the open sessions; None: to be recomputed
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_length = config.model_config.max_model_len
        self.kv_slots = self.free_slots
        self._sampling = SamplingParams(
            temperature=0, max_tokens=self.max_length, detokenize=False
        )  # not used: specq samples

    def _check(self) -> None:
        """Raise ConfigError for pipeline stages, or if KV cannot be cut after rejected drafts."""
        if self._scheduler.has_mamba_layers or self._scheduler.is_encoder_decoder:
            raise ConfigError("the vllm engine runs decoders with attention only")
        if self._scheduler.use_pp:
            raise ConfigError("the vllm engine has no pipeline parallelism; use --tensor-parallel-size")

    def _lose(self) -> None:
        """Note that a worker process is gone. The next step or heartbeat raises the error.

        vLLM calls it in the thread that watches its workers.
        """
        self._has_lost = True

    @property
    def free_slots(self) -> int:
        """See `specq.engines.Engine.free_slots`."""
        if self._has_lost:
            raise EngineLostError("a worker process of vLLM ended; see its own message above")
        num_free, block_size = self._scheduler.num_free, self._scheduler.block_size
        if self._slacks is None:
            self._slacks = Slacks.of(block_size, self._table.slacks())
        if self._slacks.count > num_free + 1:
            return free_slots(num_free, block_size, self._table.slacks())
        return self._slacks.free_slots(num_free)

    def open(self, session_id: int, token_ids: Int32Array, owner: str) -> int:
        """Start a request; return how many of its tokens have KV. The owner becomes vLLM's cache salt."""
        if session_id in self._table:
            raise EngineError(f"session {session_id} is already open")
        request = Request(
            request_id=f"{session_id}.{next(self._numbers)}",
            prompt_token_ids=token_ids.tolist(),
            sampling_params=self._sampling,
            pooling_params=None,
            cache_salt=owner or None,
            block_hasher=self._core.request_block_hasher,
        )
        holding = self._scheduler.hold(request)
        num_computed = int(request.num_computed_tokens)
        room = self._scheduler.room(holding)
        self._held[self._table.add(session_id, token_ids, num_computed, room)] = holding
        if self._slacks is not None:
            self._slacks.add(room - num_computed)
        return num_computed

    def close(self, session_id: int) -> None:
        """End a request; unknown ones are ignored."""
        place = self._table.remove(session_id)
        if place is not None:
            num_computed = int(self._table.computed[place])
            self._scheduler.drop(self._held.pop(place), self._table.take_unsaid(place), num_computed)
            self._newest = self._slacks = None

    def lengths(self, session_ids: Sequence[int]) -> IntpArray:
        """Return how many tokens of each session have KV, i64[n]. Raises EngineError for one that is not open."""
        return self._table.computed[self._table.find(session_ids)]

    def launch(self, batch: StepBatch, drafts: int = NO_DRAFTS) -> SessionFlight:
        """Begin steps that were checked; see `OverlappingEngine.launch`. `drafts`: see `Tap`."""
        members = self._members(batch.session_ids)
        places = members.places
        others = (~self._table.are_next(batch, places)).nonzero()[0]
        if len(others):
            self._check_transcripts(batch.take(others), places[others])
        newest = self._newest
        goes_on = newest is not None and members is newest.members and batch.goes_on(newest.batch)
        feeds = newest.gives_tokens if newest is not None and goes_on else self.overlaps and says_own(batch)
        waits_for_masks = batch.masks is not None and batch.fed_by is not None
        judge_late = self._judge_late if waits_for_masks else None
        flight = SessionFlight(batch, members, feeds, self._collect, self._discard, judge_late)
        delta = self._delta_of(flight, drafts, goes_on=goes_on)
        self._newest, self._slacks = flight, None
        self._workers.launch(delta)
        if delta.late:
            assert batch.drafted is not None
            assert self._workers.late is not None
            batch.drafted.awaiting.append(partial(self._workers.late.send, delta.late))
        self._table.launch(batch, places, feeds=flight.gives_tokens)
        return flight

    def _sent(self, masks: TokenMasks | None, judged: StepBatch) -> TokenMasks | None:
        """Return masks as the workers receive them. In this process they are computed when the judge asks."""
        return masks.ready(judged) if masks is not None and self.is_apart else masks

    def _judge_late(self, masks: TokenMasks, judged: StepBatch) -> None:
        """Let the workers judge the newest step."""
        sent = self._sent(masks, judged)
        assert sent is not None
        self._workers.judge(sent)

    def _collect(self, flight: SessionFlight) -> StepOutput:
        """Wait for the oldest step in flight; see `Launched.collect`."""
        output = self._workers.collect()
        judgements, self._slacks = Judgements.of(output.judgements), None
        self._table.commit(
            flight.batch, flight.members.places, self._are_open(flight), judgements, feeds=flight.gives_tokens
        )
        return output

    def _discard(self, flight: SessionFlight) -> None:
        """Forget the newest step in flight; see `Launched.discard`. Its sessions keep the blocks that it took."""
        self._workers.discard()
        self._newest = self._slacks = None
        self._table.revert(flight.batch, flight.members.places, self._are_open(flight), feeds=flight.gives_tokens)

    def _are_open(self, flight: SessionFlight) -> BoolArray:
        """Return bool[n]: which sessions of a step have not been closed since."""
        return self._table.are_open(flight.members.places, flight.members.openings)

    def _members(self, session_ids: list[int]) -> Members:
        """Return the members of a step. The same object as in the step before if the sessions are the same."""
        if self._newest is not None and session_ids == self._newest.batch.session_ids:
            return self._newest.members
        places = self._table.find(session_ids)
        holdings = [self._held[place] for place in places.tolist()]
        return Members(
            places, self._table.openings[places], holdings, [holding.request.request_id for holding in holdings]
        )

    def _delta_of(self, flight: SessionFlight, drafts: int, *, goes_on: bool) -> StepDelta:
        """Allocate the KV for a step, which must be free; return the message for workers.

        `goes_on`: the step continues the newest one by one token.
        """
        batch, members, newest = flight.batch, flight.members, self._newest
        are_same = newest is not None and members is newest.members
        news: dict[int, JobParams] = {}
        if not goes_on:
            each = enumerate(zip(members.holdings, batch.params, strict=True))
            news = {i: params for i, (holding, params) in each if holding.has_news(params)}
        even = self._even_length(batch, members.places)
        delta = StepDelta(
            request_ids=None if are_same else members.request_ids,
            batch=None if goes_on else batch.without_params(),
            params=news,
            even_length=even,
            feeds=flight.gives_tokens,
            masks=self._sent(batch.masks, batch.judged()) if flight.judge_late is None else None,
            is_judged_late=flight.judge_late is not None,
            drafts=drafts,
        )
        if delta.batch is not None and batch.drafted is not None and self._workers.late is not None:
            delta.batch.drafted, delta.late = DeviceTokens(None), self._workers.late.next_number()
        self._allocate(delta, batch, members, row_counts(batch, even))
        return delta

    def _allocate(self, delta: StepDelta, batch: StepBatch, members: Members, sizes: IntpArray) -> None:
        """Allocate the KV of a step's rows, i64[n] of each session, and some blocks ahead. Write it into a delta."""
        table, places, block_size = self._table, members.places, self._scheduler.block_size
        ends, rooms = table.computed[places] + sizes, table.rooms[places]
        num_rows = int(sizes.sum())
        num_drafted = self._num_drafted(ends, rooms, num_rows, delta.drafts) if delta.drafts > 0 else 0
        grows, num_ahead = ends + num_drafted > rooms, np.full_like(ends, num_drafted)
        ahead = self._to_grow_ahead(batch, ends + num_drafted, rooms, num_rows)
        grows[ahead], num_ahead[ahead] = True, (rooms + BLOCKS_AHEAD * block_size - ends)[ahead]
        has_news = grows
        if delta.request_ids is not None:
            is_new = np.array([holding.num_sent is None for holding in members.holdings], np.bool_)
            has_news = grows | is_new
            # Other sessions may share a block once its first session fills it, also if that session had room for it
            # from the start.
            grows = grows | (is_new & (ends // block_size > table.computed[places] // block_size))
        for i in grows.nonzero()[0].tolist():
            place, holding, computed = int(places[i]), members.holdings[i], int(table.computed[places[i]])
            self._scheduler.allocate(holding, table.take_unsaid(place), computed, int(sizes[i]), int(num_ahead[i]))
            table.rooms[place] = self._scheduler.room(holding)
        self._scheduler.announce(delta, members.holdings, has_news.nonzero()[0].tolist())

    def _num_drafted(self, ends: IntpArray, rooms: IntpArray, num_rows: int, drafts: int) -> int:
        """Return for how many tokens behind a step vLLM's drafter gets KV: a block drafter also for the one before.

        0 if others may need that memory. Then the drafter may write over what it knows of other sessions' texts.
        """
        num = drafts + 1
        num_blocks = int((-(-np.maximum(ends + num - rooms, 0) // self._scheduler.block_size)).sum())
        return num if self._spares(num_blocks, num_rows) else 0

    def _spares(self, num_blocks: int, num_rows: int) -> bool:
        """Return whether a step of `num_rows` rows may take more blocks than its rows need.

        All that open sessions have left to compute must still fit, with one more context of any length.
        """
        promised = num_rows + self._table.num_pending + self.max_length
        return bool(self.free_slots >= promised + num_blocks * self._scheduler.block_size)

    def _to_grow_ahead(self, batch: StepBatch, ends: IntpArray, rooms: IntpArray, num_rows: int) -> IntpArray:
        """Return the places of sessions that get their next block before they need it, i64[any].

        ends: i64[n], the tokens with KV after the step of `num_rows` rows. rooms: i64[n], as many fit before the step.

        Sessions with prompts of equal length would all need a block in the same step, which would take much longer.
        Now each step allocates about as many blocks as its sessions fill in a step, if memory is left (`_spares`).
        """
        block_size, needs_none = self._scheduler.block_size, ends <= rooms
        most = -(-len(batch) // block_size) - int(np.count_nonzero(~needs_none))
        if most <= 0 or not self._spares(most * BLOCKS_AHEAD, num_rows):
            return np.zeros(0, np.intp)
        may_grow = batch.is_judged & needs_none & (rooms < self.max_length)
        return next_to_grow(np.where(may_grow, rooms - ends, block_size), block_size, most)

    def _even_length(self, batch: StepBatch, places: IntpArray) -> int:
        """Return the padded number of rows per session for a whole graph; 0: no padding.

        It is 0 if padding would take KV that others may need, or exceed the maximum length.
        """
        length = even_length(batch, self._graphs)
        if not length:
            return 0
        ends, block_size = self._table.computed[places] + length, self._scheduler.block_size
        num_blocks = int((-(-np.maximum(ends - self._table.rooms[places], 0) // block_size)).sum())
        has_room = num_blocks + len(batch) <= self._scheduler.num_free
        return length if has_room and int(ends.max()) <= self.max_length else 0

    def _check_transcripts(self, batch: StepBatch, places: IntpArray) -> None:
        """Raise EngineError unless each step continues its request's tokens and is judged only at the end."""
        is_wrong = batch.is_judged != (batch.base_lens == self._table.lengths[places])
        if is_wrong.any():
            session_id = batch.session_ids[int(is_wrong.argmax())]
            raise EngineError(f"session {session_id}: a step must be judged at the end of its transcript")
        own = np.arange(len(batch)) if batch.fed_by is None else (batch.fed_by < 0).nonzero()[0]
        token_ids, firsts = batch.token_ids.tolist(), (batch.ends - batch.sizes)[own].tolist()
        spans = zip(firsts, batch.starts[own].tolist(), batch.base_lens[own].tolist(), strict=True)
        for i, place, (first, start, end) in zip(own.tolist(), places[own].tolist(), spans, strict=True):
            holding = self._held[place]
            holding.tell(self._table.take_unsaid(place))
            if token_ids[first : first + end - start] != holding.request.all_token_ids[start:end]:
                raise EngineError(f"session {batch.session_ids[i]}: the step's tokens are not those of its transcript")

    def shutdown(self) -> None:
        """Release the device and stop the worker processes."""
        self._core.shutdown()
        self._workers.close()

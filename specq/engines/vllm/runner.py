"""Steps of vLLM's model runner, judged by specq in the place of vLLM's samplers, between their launch and their collection.

vLLM's own sampling and its books behind it are never reached: `execute_model` leaves logits on the device, which are judged here, and the
runner's requests go on with what was said. On a GPU neither waits for the device: the next step may be launched before this one is collected,
and its rows take their tokens where vLLM's own asynchronous scheduling has them (`prev_sampled_token_ids`). Until they are known, a
placeholder stands for them in the runner's books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from specq.engines.vllm.graphs import EvenGraphs
from specq.engines.vllm.rows import ANY_TOKEN, judged_rows, said_tokens
from specq.protocol import Int32Array, IntpArray
from specq.verification import Judgements, StepBatch, cuda_rows
from specq.verification.begun import Judging, begin
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.faults import judge_each
from specq.verification.transfers import to_device

Judge = Callable[[StepBatch, torch.Tensor], Judging | Judgements]


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A step that was launched.

    request_ids   of those that are judged; num_said: how many tokens each has said before
    feeds         whether the next step may begin with its tokens, which have placeholders
    logits        what is logged of it, if anything is
    """

    batch: StepBatch
    request_ids: list[str]
    num_said: list[int]
    judging: Judging | Judgements
    feeds: bool
    logits: torch.Tensor | None


class DraftedElsewhere:
    """What stands in a runner's `speculative_config` while a step with drafts runs: from 0.27 on vLLM looks for drafted tokens only where there
    is one. It is false, so that a runner that has no drafter looks for none."""

    def __bool__(self) -> bool:
        return False

    def use_ngram_gpu(self) -> bool:
        """Return whether vLLM drafts on the device."""
        return False


class RunnerSteps:
    """Runs steps in `runner`, vLLM's first; `execute` is its worker's `execute_model`."""

    def __init__(self, runner: Any, execute: Callable[[SchedulerOutput], Any], *, verbose: bool) -> None:
        self._runner, self._execute, self._verbose = runner, execute, verbose
        self.graphs = EvenGraphs(runner)
        self._flights: deque[RunnerFlight] = deque()
        self._has_judged = False
        self._knows_drafts = runner.speculative_config is not None
        self.overlaps: bool = runner.device.type == "cuda" and cuda_rows.is_available()
        self.judge: Judge = begin if self.overlaps else judge_each
        if self.overlaps:  # what vLLM copies to the device is not written again before it is there
            runner.prepare_inputs_event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def launch(
        self, output: SchedulerOutput, request_ids: list[str], batch: StepBatch, even_length: int, feeds: bool
    ) -> None:
        """Begin a step of requests, each with its session's step in `batch`. `even_length`: rows that each request has, if that is more than were
        asked for; 0: as many as were. `feeds`: whether the next step may begin with what this one says."""
        self._feed(request_ids, batch)
        if not self._knows_drafts:
            self._runner.speculative_config = DraftedElsewhere() if len(batch.parents) else None
        self.graphs.use(even_length)
        self._execute(output)
        logits = self._logits(request_ids, batch, even_length)
        judging = self.judge(batch, logits)
        if len(logits) and not self._has_judged:
            self._has_judged = True
            warm_up(logits)
        judged = [name for name, is_judged in zip(request_ids, batch.is_judged.tolist(), strict=True) if is_judged]
        num_said = [len(self._runner.requests[name].output_token_ids) for name in judged]
        assert not feeds or (isinstance(judging, Judging) and (judging.tokens is not None or not judged))
        flight = RunnerFlight(batch, judged, num_said, judging, feeds, logits if self._verbose else None)
        if feeds:
            self._say(flight, np.ones(len(judged), np.intp), np.full(len(judged), ANY_TOKEN, np.int32), 0)
        self._flights.append(flight)

    def collect(self) -> Judgements:
        """Wait for the oldest step; return its judgements in order."""
        flight = self._flights.popleft()
        judging = flight.judging
        judgements = judging.finish() if isinstance(judging, Judging) else judging
        self._say(flight, *said_tokens(judgements), int(flight.feeds))
        if flight.logits is not None and flight.batch.session_ids[0] >= 0:  # not while it is profiled
            log_decisions(flight.batch, flight.logits, judgements)
        return judgements

    def discard(self) -> None:
        """Forget the newest step; the next message of the scheduler's says how much each request has said."""
        self._flights.pop()

    def _feed(self, request_ids: list[str], batch: StepBatch) -> None:
        """Let vLLM take tokens from the step in flight, which is the newest."""
        requests = self._runner.input_batch
        requests.prev_sampled_token_ids, requests.prev_req_id_to_index = None, None
        if batch.fed_by is None:
            return
        judging = self._flights[-1].judging
        assert isinstance(judging, Judging)
        assert judging.tokens is not None
        requests.prev_sampled_token_ids = judging.tokens[:, None]
        fed = zip(request_ids, batch.fed_by.tolist(), strict=True)
        requests.prev_req_id_to_index = {name: place for name, place in fed if place >= 0}

    def _logits(self, request_ids: list[str], batch: StepBatch, even_length: int) -> torch.Tensor:
        """Take the logits of what is judged, [rows, vocab], in the order of the step, as vLLM's `sample_tokens` would."""
        runner = self._runner
        logits: torch.Tensor = runner.execute_model_state.logits
        runner.execute_model_state = None
        runner.eplb_step()
        places = {name: i for i, name in enumerate(request_ids)}
        names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        rows = judged_rows(batch, np.array([places[name] for name in names], np.intp), even_length)
        if rows is None:
            return logits
        return logits[to_device(rows, logits.device)]

    def _say(self, flight: RunnerFlight, counts: IntpArray, token_ids: Int32Array, num_held: int) -> None:
        """Let the requests that were judged, those that are there still, go on with tokens: counts i64[n] of each, token_ids i32[all].
        `num_held` placeholders stand there already; behind them there may be one more, of the next step."""
        requests, first = self._runner.input_batch, 0
        ends, tokens = counts.cumsum().tolist(), token_ids.tolist()
        for name, num_said, end in zip(flight.request_ids, flight.num_said, ends, strict=True):
            state = self._runner.requests.get(name)
            if state is not None:
                state.output_token_ids[num_said : num_said + num_held] = tokens[first:end]
                row = requests.req_id_to_index.get(name)
                if row is not None:  # else its tokens are read from there when it takes part again
                    start = requests.num_prompt_tokens[row] + num_said
                    fitting = tokens[first:end][: requests.token_ids_cpu.shape[1] - start]  # the last one need not
                    requests.token_ids_cpu[row, start : start + len(fitting)] = fitting
                    requests.is_token_ids[row, start : start + len(fitting)] = True
                    if not num_held:
                        requests.num_tokens_no_spec[row] = start + len(fitting)
            first = end

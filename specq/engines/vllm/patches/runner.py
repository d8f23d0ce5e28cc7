"""Steps of vLLM's model runner, judged by specq in the place of vLLM's samplers.

vLLM's own sampling and its tables behind it are never reached: `execute_model` leaves logits on the device, which are
judged here, and the runner's requests go on with what was said (`batch_state`). On a GPU neither waits for the device:
the next step may be launched before this one has answered (`StepResult`), and its rows take their tokens where the
judge has left them (`token_injection`).

What a step says, on its way to whoever asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from threading import Lock
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from specq.engines.vllm.late_tokens import TokenReceiver
from specq.engines.vllm.patches.batch_state import BatchState
from specq.engines.vllm.patches.cuda_graphs import WholeGraphs
from specq.engines.vllm.patches.decode_fast_path import DecodeFastPath
from specq.engines.vllm.patches.token_injection import TokenInjection
from specq.engines.vllm.rows import judged_rows, said_tokens
from specq.engines.vllm.step_delta import LatestStep, StepDelta
from specq.protocol import IntpArray
from specq.verification import Judgements, StepBatch, cuda_rows
from specq.verification.begun import Judging, begin
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.judge import judge_each
from specq.verification.transfers import to_device


class StepResult(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM has no types where it is not installed
    """The judgements of a step; vLLM waits for them in a thread of its own, where it has one, and the worker when it
    needs them.

    tokens  i32[judged] on the device, if the next step may begin with them
    """

    def __init__(
        self,
        batch: StepBatch,
        judging: Judging | Judgements,
        logits: torch.Tensor | None,
        done: torch.cuda.Event | None,
    ) -> None:
        """`logits`: what is logged of it, if anything is; `done`: comes when the device has judged, where a thread
        waits for that beside one that launches."""
        self.tokens = judging.tokens if isinstance(judging, Judging) else None
        self._batch, self._judging, self._logits, self._done = batch, judging, logits, done
        self._lock = Lock()

    @torch.inference_mode()
    def get_output(self) -> Judgements:
        """Wait for the judgements, one for each judged session, in order."""
        with self._lock:
            if self._done is not None:
                self._done.synchronize()
            if isinstance(self._judging, Judging):
                self._judging = self._judging.finish()
            if self._logits is not None and self._batch.session_ids[0] >= 0:  # not while it is profiled
                log_decisions(self._batch.known(), self._logits, self._judging)
            self._done, self._logits = None, None
            return self._judging

    def get_kv_connector_output(self) -> None:
        """Return None, since there is no KV connector. vLLM asks for this from 0.33 on."""


Judge = Callable[[StepBatch, torch.Tensor], Judging | Judgements]


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A step that was launched; request_ids and lengths i64[judged] of its transcripts: of those that are judged."""

    request_ids: list[str]
    lengths: IntpArray
    answer: StepResult


class DraftedElsewhere:
    """What stands in a runner's `speculative_config` while a step with drafts runs: from 0.27 on vLLM looks for drafted
    tokens only where there is one. It is false, so that a runner that has no drafter looks for none."""

    def __bool__(self) -> bool:
        return False

    def use_ngram_gpu(self) -> bool:
        """Return whether vLLM drafts on the device."""
        return False


class RunnerSteps:
    """Runs steps in `runner`, vLLM's first; `execute` is its worker's `execute_model`. `is_apart`: in a process that
    has nothing else to do; `late`: where drafted tokens come from then."""

    def __init__(
        self,
        runner: Any,
        execute: Callable[[SchedulerOutput], Any],
        *,
        verbose: bool,
        is_apart: bool,
        late: TokenReceiver | None = None,
    ) -> None:
        self._runner, self._execute, self._verbose, self._is_apart = runner, execute, verbose, is_apart
        self.graphs = WholeGraphs(runner)
        self._latest, self._batch_state = LatestStep(), BatchState(runner)
        self._injection = TokenInjection(runner, self._batch_state, late)
        self._fast_path = DecodeFastPath(runner, self._batch_state, self._injection)
        self._flights: deque[RunnerFlight] = deque()
        self._has_judged = False
        self._knows_drafts = runner.speculative_config is not None
        self.overlaps: bool = runner.device.type == "cuda" and cuda_rows.is_available()
        self.judge: Judge = begin if self.overlaps else judge_each
        if self.overlaps:  # what vLLM copies to the device is not written again before it is there
            runner.prepare_inputs_event = _event(sleeps=is_apart)

    def launch(self, delta: StepDelta, num_in_flight: int) -> StepResult:
        """Begin a step, behind so many whose answers nobody has had."""
        self._note_said(num_in_flight)
        batch, names = self._latest.apply(delta), self._latest.request_ids
        if (
            self._runner.prepare_inputs_event is not None
        ):  # vLLM may still be copying what is written there: it waits for this, too, but later
            self._runner.prepare_inputs_event.synchronize()
        output = self._batch_state.begin(delta, names, batch)
        self._injection.prepare(batch, names, self._tokens_in_flight(batch), delta.late)
        self._fast_path.expect(delta)
        if not self._knows_drafts:
            self._runner.speculative_config = DraftedElsewhere() if len(batch.parents) else None
        self.graphs.use(delta.even_length)
        self._execute(output)
        self._batch_state.settle(names)
        batch = batch.as_read()
        logits = self._logits(batch, delta.even_length)
        judging = self.judge(batch, logits)
        if len(logits) and not self._has_judged:
            self._has_judged = True
            warm_up(logits)
        answer = StepResult(batch, judging, logits if self._verbose else None, self._mark())
        judged = names if batch.are_judged else list(compress(names, batch.is_judged.tolist()))
        assert not delta.feeds or answer.tokens is not None or not judged
        self._flights.append(RunnerFlight(judged, batch.base_lens[batch.is_judged].astype(np.intp), answer))
        return answer

    def discard(self) -> None:
        """Forget the newest step; the next delta says how far each request has come."""
        self._flights.pop()

    def _note_said(self, num_in_flight: int) -> None:
        """Write down what the steps have said that the host knows of; the newest ones are in flight."""
        while len(self._flights) > num_in_flight:
            flight = self._flights.popleft()
            self._batch_state.say(flight.request_ids, flight.lengths, *said_tokens(flight.answer.get_output()))

    def _mark(self) -> torch.cuda.Event | None:
        """Return what comes when the device has done all that it was given, where a thread waits for it."""
        if not (self._is_apart and self.overlaps):
            return None
        done = _event(sleeps=True)
        done.record()
        return done

    def _tokens_in_flight(self, batch: StepBatch) -> torch.Tensor | None:
        """Return what the newest step in flight says, i32[judged] on the device, if a step begins with some of it."""
        if batch.fed_by is None:
            return None
        return self._flights[-1].answer.tokens

    def _logits(self, batch: StepBatch, even_length: int) -> torch.Tensor:
        """Take the logits of what is judged, [rows, vocab], in the order of the step, as vLLM's `sample_tokens`
        would."""
        runner = self._runner
        logits: torch.Tensor = runner.execute_model_state.logits
        runner.execute_model_state = None
        runner.eplb_step()
        if batch.is_plain:
            at = self._batch_state.rows_on(logits.device)
        else:
            rows = judged_rows(batch, self._batch_state.order, even_length)
            at = None if rows is None else to_device(rows, logits.device)
        return logits if at is None else logits[at]


def _event(*, sleeps: bool) -> torch.cuda.Event:
    """Return an event of the device's. Whoever sleeps for one wakes late; whoever looks for it all the time is in the
    way of others who launch."""
    return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

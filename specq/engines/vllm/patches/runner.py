"""Steps of vLLM's model runner, judged by specq instead of vLLM's samplers.

vLLM's own sampling and its tables are never reached. `execute_model` leaves logits on the device, which are judged
here. The runner's requests continue with the judged tokens (`batch_state`). On a GPU neither waits for the device. The
next step may be launched before this one has its result (`StepResult`). Its rows take their tokens from the memory of
the judge (`token_injection`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from threading import Event, Lock
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput

from specq.engines.vllm.late_tokens import TokenReceiver
from specq.engines.vllm.patches.batch_state import BatchState
from specq.engines.vllm.patches.cuda_graphs import WholeGraphs
from specq.engines.vllm.patches.decode_fast_path import DecodeFastPath
from specq.engines.vllm.patches.drafter import StepBehind, StepDrafter
from specq.engines.vllm.patches.token_injection import TokenInjection
from specq.engines.vllm.rows import judged_rows, said_tokens, scored_rows
from specq.engines.vllm.step_delta import LatestStep, StepDelta
from specq.protocol import IntpArray, Logprobs, StepOutput
from specq.verification import Judgements, StepBatch, TokenMasks, cuda_rows
from specq.verification.begun import Judging, begin
from specq.verification.devices import warm_up
from specq.verification.explain import log_decisions
from specq.verification.judge import judge_each
from specq.verification.logprobs import ScoredLogprobs
from specq.verification.transfers import Fetched, to_device


class StepResult(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM has no types if it is not installed
    """The output of a step.

    vLLM waits for them in its own thread, if it has one. The worker waits when it needs them.

    - tokens: i32[judged] on the device, if the next step may begin with them.
    - batch, logits: the steps, and the logits to judge.
    - scored: log-probabilities of scored rows, on their way to the host.
    - behind: what vLLM's drafter needs, if it follows the step.
    """

    def __init__(
        self,
        batch: StepBatch,
        logits: torch.Tensor,
        scored: ScoredLogprobs | None = None,
        behind: StepBehind | None = None,
    ) -> None:
        self.batch, self.logits, self.behind = batch, logits, behind
        self._scored: ScoredLogprobs | dict[int, Logprobs] = {} if scored is None else scored
        self.tokens: torch.Tensor | None = None
        self._judging: Judging | Judgements = Judgements.of(())
        self._done: torch.cuda.Event | None = None
        self._drafts: Fetched | None = None
        self._is_logged = False
        self._lock, self._has_begun = Lock(), Event()

    def begin(
        self,
        judging: Judging | Judgements,
        done: torch.cuda.Event | None,
        drafts: Fetched | None,
        *,
        is_logged: bool,
    ) -> None:
        """Take the judging in progress.

        `done`: the event that the device has judged, if a separate thread waits for it. `drafts`: what vLLM's drafter
        drafts behind the step.
        """
        self._judging, self._done, self._is_logged = judging, done, is_logged
        self._drafts, self.behind = drafts, None
        self.tokens = judging.tokens if isinstance(judging, Judging) else None
        self._has_begun.set()

    def drop(self) -> None:
        """Have no judgements, if judging has not begun."""
        self._has_begun.set()

    @torch.inference_mode()
    def get_output(self) -> StepOutput:
        """Wait for the judgements, one for each judged session, in order, and what else the step returns."""
        self._has_begun.wait()
        with self._lock:
            if self._done is not None:
                self._done.synchronize()
            if isinstance(self._judging, Judging):
                self._judging = self._judging.finish()
            if isinstance(self._scored, ScoredLogprobs):
                self._scored = self._scored.wait()
            if self._is_logged and self.batch.session_ids[0] >= 0:  # profiling steps have negative ids
                log_decisions(self.batch.known(), self.logits, self._judging)
            self._done, self._is_logged = None, False
            drafts = None if self._drafts is None else self._drafts.wait()
            return StepOutput(self._judging, scored=self._scored, drafts=drafts)

    def get_kv_connector_output(self) -> None:
        """Return None, since there is no KV connector. vLLM calls this from 0.33 on."""


Judge = Callable[[StepBatch, torch.Tensor], Judging | Judgements]


@dataclass(frozen=True, slots=True)
class RunnerFlight:
    """A launched step. request_ids and lengths i64[judged] of the transcripts of its judged sessions."""

    request_ids: list[str]
    lengths: IntpArray
    answer: StepResult


class DraftedElsewhere:
    """The `speculative_config` of a runner while a step with drafts runs.

    From 0.27 on vLLM looks for draft tokens only if there is such a configuration. It is false, so that a runner
    without a drafter does not look for one.
    """

    def __bool__(self) -> bool:
        return False

    def use_ngram_gpu(self) -> bool:
        """Return whether vLLM drafts on the device."""
        return False


class RunnerSteps:
    """Runs steps in `runner`, vLLM's first model runner; `execute` is its worker's `execute_model`.

    `is_apart`: in a process without other work. `late`: the source of late draft tokens in that case.
    """

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
        self.drafter = StepDrafter(runner, self._batch_state)
        self._fast_path = DecodeFastPath(runner, self._batch_state, self._injection)
        self._flights: deque[RunnerFlight] = deque()
        self._has_judged = False
        self._knows_drafts = runner.speculative_config is not None
        self.overlaps: bool = runner.device.type == "cuda" and cuda_rows.is_available()
        self._judge_by: Judge = begin if self.overlaps else judge_each
        if self.overlaps:  # vLLM must not overwrite data before its copy to the device is complete
            runner.prepare_inputs_event = _event(sleeps=is_apart)

    def launch(self, delta: StepDelta, num_in_flight: int) -> StepResult:
        """Begin a step, after `num_in_flight` steps whose results have not been read."""
        self._note_said(num_in_flight)
        batch, names = self._latest.apply(delta), self._latest.request_ids
        if (
            self._runner.prepare_inputs_event is not None
        ):  # vLLM may still be copying this data; it also waits for the event, but later
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
        scored = self._scores(batch, delta.even_length)
        behind = self.drafter.behind(delta, names, batch, output)
        logits = self._logits(batch, delta.even_length)
        answer = StepResult(batch, logits, scored, behind)
        if not delta.is_judged_late:
            self._judge(answer)
        if len(logits) and not self._has_judged:
            self._has_judged = True
            warm_up(logits)
        judged = names if batch.are_judged else list(compress(names, batch.is_judged.tolist()))
        assert not delta.feeds or delta.is_judged_late or answer.tokens is not None or not judged
        self._flights.append(RunnerFlight(judged, batch.base_lens[batch.is_judged].astype(np.intp), answer))
        return answer

    def judge(self, masks: TokenMasks) -> None:
        """Judge the newest step, which waits for its masks."""
        answer = self._flights[-1].answer
        answer.batch.masks = masks
        self._judge(answer)

    def _judge(self, answer: StepResult) -> None:
        judging = self._judge_by(answer.batch, answer.logits)
        mark, drafts = self._mark(), None
        if answer.behind is not None:
            judging, drafts = self.drafter.draft(answer.behind, judging)
        answer.begin(judging, mark, drafts, is_logged=self._verbose)

    def discard(self) -> None:
        """Forget the newest step. The next delta has the position of each request."""
        self._flights.pop().answer.drop()

    def _note_said(self, num_in_flight: int) -> None:
        """Record the tokens of the steps that the host knows. The newest steps are in flight."""
        while len(self._flights) > num_in_flight:
            flight = self._flights.popleft()
            judgements = Judgements.of(flight.answer.get_output().judgements)
            self._batch_state.say(flight.request_ids, flight.lengths, *said_tokens(judgements))

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event for the device work's end, if a thread waits for it."""
        if not (self._is_apart and self.overlaps):
            return None
        done = _event(sleeps=True)
        done.record()
        return done

    def _tokens_in_flight(self, batch: StepBatch) -> torch.Tensor | None:
        """Return the newest step's tokens, i32[judged] on device, if the batch begins with some."""
        if batch.fed_by is None:
            return None
        return self._flights[-1].answer.tokens

    def _scores(self, batch: StepBatch, even_length: int) -> ScoredLogprobs | None:
        """Begin to compute the log-probabilities of scored rows. vLLM computed logits for other rows only.

        The caller limits these rows, so that their logits fit into the device's memory.
        """
        if not (batch.extras and batch.scored):
            return None
        hidden = self._runner.execute_model_state.hidden_states
        rows = to_device(scored_rows(batch, self._batch_state.order, even_length), hidden.device)
        return ScoredLogprobs(batch.scored, self._runner.model.compute_logits(hidden[rows]))

    def _logits(self, batch: StepBatch, even_length: int) -> torch.Tensor:
        """Take the logits to judge, [rows, vocab], in step order, like vLLM's `sample_tokens`."""
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
    """Return an event of the device.

    A thread that sleeps for an event wakes late. A thread that polls delays the threads that launch.
    """
    return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]

"""What a step says, on its way to whoever asks for it."""

from __future__ import annotations

from threading import Lock

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from specq.verification import Judgements, StepBatch
from specq.verification.begun import Judging
from specq.verification.explain import log_decisions


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

"""Steps in which the requests of the step before go on, each by one token, as most plain ones do: the device counts on
by itself.

For each step vLLM's first model runner works out on the host where each row stands, and copies that to the device in
some twenty small pieces: about 0.85 ms of a worker's time, of the 3 that it takes to launch a step, while each of two
or four GPUs that share a 7B model needs as long for the step itself. Here everything is there already, but for one
token further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specq.engines.vllm.patches.batch_state import BatchState
from specq.engines.vllm.patches.token_injection import TokenInjection
from specq.engines.vllm.step_delta import StepDelta
from specq.engines.vllm.versions import COUNTS, can_count

PREPARE = "_prepare_inputs"  # the method with which vLLM's runner makes a step's rows ready


class DecodeFastPath:
    """Stands in for `PREPARE` of `runner`, where its rows depend on nothing else than what is counted here."""

    def __init__(self, runner: Any, batch_state: BatchState, injection: TokenInjection) -> None:
        self._runner, self._batch_state, self._injection = runner, batch_state, injection
        self._prepare: Callable[..., Any] = getattr(runner, PREPARE)
        self._delta: StepDelta | None = None  # of the step that is prepared next, if its requests go on
        self._prepared: Any = None  # what the runner made of the newest step, if that was a plain one
        if can_count(runner):
            setattr(runner, PREPARE, self._go_on_or_prepare)

    def expect(self, delta: StepDelta) -> None:
        """Let the next step be this one."""
        self._delta = delta if delta.batch is None else None

    def _go_on_or_prepare(self, output: Any, num_scheduled: Any, *arguments: Any, **options: Any) -> Any:
        """See `PREPARE`; what fails on the way leaves nothing that a later step could go on with."""
        delta, self._delta = self._delta, None
        prepared, self._prepared = self._prepared, None
        if delta is not None and prepared is not None and self._batch_state.stand_still:
            self._go_on(len(num_scheduled), has_blocks=bool(delta.blocks))
        else:
            prepared = self._prepare(output, num_scheduled, *arguments, **options)
            if len(num_scheduled) != output.total_num_scheduled_tokens:  # requests with more than a row
                return prepared
        self._prepared = prepared
        return prepared

    def _go_on(self, num: int, *, has_blocks: bool) -> None:
        """Let each of so many requests stand one token further, and take the token that the step before said."""
        runner, blocks = self._runner, self._runner.input_batch.block_table
        if has_blocks:
            blocks.commit_block_table(num)
        for name in COUNTS:
            getattr(runner, name)[:num].add_(1)
        blocks.compute_slot_mapping(num, runner.query_start_loc.gpu[: num + 1], runner.positions[:num])
        self._injection.feed_all(num)

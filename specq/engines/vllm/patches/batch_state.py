"""Update the rows, computed tokens and output tokens of vLLM's first model runner with arrays.

In each step the runner loops over all requests that it receives. So it receives only requests with new blocks and
requests absent from the last step. The number of computed tokens of all others is written into its batch at once. The
output tokens of a request are in its row of the batch. The request's own list of them is only updated while it has no
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from specq.engines.vllm.padding import row_counts
from specq.engines.vllm.rows import ANY_TOKEN, are_all
from specq.engines.vllm.step_delta import StepDelta
from specq.protocol import Int32Array, IntpArray
from specq.verification import StepBatch, places_in_runs
from specq.verification.transfers import to_device


class BatchState:
    """The tables of `runner`.

    - rows: i64[n], each request's row in the runner's batch, for the running step.
    - order: i64[n], which request each row has.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._num_groups = len(runner.kv_cache_config.kv_cache_groups)
        self._names: Sequence[str] = ()  # of the running step
        self._places: list[str] = []  # the same, in the order of the batch
        self.rows: IntpArray = np.zeros(0, np.intp)
        self.order: IntpArray = self.rows
        self._rows_there: torch.Tensor | None = None  # on the device; None: not copied yet, or in order

    def begin(self, delta: StepDelta, names: Sequence[str], batch: StepBatch) -> SchedulerOutput:
        """Record the number of computed tokens of a step's requests. Return the input of the runner."""
        if names is not self._names:
            self._keep_lists(set(names).union(delta.ended))
        rows = self._rows_of(names)
        absent = (rows < 0).nonzero()[0].tolist()
        self._come_to(rows, batch, bool(absent))
        told = {*delta.blocks, *absent}
        sizes = row_counts(batch, delta.even_length)
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = list(delta.new.values())
        output.scheduled_cached_reqs = self._cached(delta, names, batch, sorted(told.difference(delta.new)))
        output.num_scheduled_tokens = dict(zip(names, sizes.tolist(), strict=True))
        output.total_num_scheduled_tokens = int(sizes.sum())
        output.scheduled_spec_decode_tokens = _chains(names, sizes - batch.num_tokens) if len(batch.parents) else {}
        output.num_common_prefix_blocks = [0] * self._num_groups
        output.new_block_ids_to_zero = delta.zeroed
        output.finished_req_ids = set(delta.ended)
        return output

    @property
    def stand_still(self) -> bool:
        """Whether the batch has the requests of the step before, in the same rows."""
        same: bool = self._places == self._runner.input_batch.req_ids
        return same

    def settle(self, names: Sequence[str]) -> None:
        """Record the rows of the step's requests, once the runner has assigned them."""
        requests = self._runner.input_batch
        if names is not self._names or not self.stand_still:
            self.rows = self._rows_of(names)
            self.order = self.rows.argsort()
            self._names, self._places, self._rows_there = names, list(requests.req_ids), None

    def rows_on(self, device: torch.device) -> torch.Tensor | None:
        """Return `rows` on the device, i64[n]; None: 0, 1, 2 and so on.

        It is copied once for steps with the same requests in the same rows.
        """
        if self._rows_there is None and not are_all(self.rows):
            self._rows_there = to_device(self.rows, device)
        return self._rows_there

    def say(self, names: Sequence[str], lengths: IntpArray, counts: IntpArray, token_ids: Int32Array) -> None:
        """Append tokens to existing requests: counts i64[n] of each, token_ids i32[all].

        `lengths`, i64[n], are the numbers of tokens before.
        """
        rows = self._rows_of(names)
        absent = (rows < 0).nonzero()[0].tolist()
        self._write(rows, lengths, counts, token_ids, bool(absent))
        if not absent:
            return
        ends, tokens = counts.cumsum().tolist(), token_ids.tolist()
        for place in absent:
            state = self._runner.requests.get(names[place])
            if state is not None:
                first, count = int(lengths[place]) - state.num_prompt_tokens, int(counts[place])
                state.output_token_ids[first : first + count] = tokens[ends[place] - count : ends[place]]

    def _write(
        self, rows: IntpArray, lengths: IntpArray, counts: IntpArray, token_ids: Int32Array, some_absent: bool
    ) -> None:
        """Write new tokens into the rows of the batch; see `say`. `some_absent`: some rows are -1."""
        requests = self._runner.input_batch
        width = requests.token_ids_cpu.shape[1]
        at, of_each = lengths, rows
        if len(token_ids) > len(rows):
            at, of_each = lengths.repeat(counts) + places_in_runs(counts), rows.repeat(counts)
        ends = lengths + counts
        if some_absent or int(ends.max(initial=0)) > width:  # the last token may not fit
            fits = (of_each >= 0) & (at < width)
            at, of_each, token_ids = at[fits], of_each[fits], token_ids[fits]
            rows, ends = rows[rows >= 0], np.minimum(ends[rows >= 0], width)
        requests.token_ids_cpu[of_each, at] = token_ids
        requests.is_token_ids[of_each, at] = True
        requests.num_tokens_no_spec[rows] = np.maximum(requests.num_tokens_no_spec[rows], ends)

    def _come_to(self, rows: IntpArray, batch: StepBatch, some_absent: bool) -> None:
        """Write the positions of a step's requests into the rows of the batch; see `_write`."""
        requests, starts, ends = self._runner.input_batch, batch.starts, batch.base_lens
        if some_absent:
            starts, ends, rows = starts[rows >= 0], ends[rows >= 0], rows[rows >= 0]
        requests.num_computed_tokens_cpu[rows] = starts
        requests.num_tokens_no_spec[rows] = np.maximum(ends, requests.num_prompt_tokens[rows])

    def _rows_of(self, names: Sequence[str]) -> IntpArray:
        """Return the current rows of requests, i64[n]; -1 for those without one."""
        requests = self._runner.input_batch
        if names is self._names and self.stand_still:
            return self.rows
        return np.array([requests.req_id_to_index.get(name, -1) for name in names], np.intp)

    def _keep_lists(self, staying: set[str]) -> None:
        """Save the output tokens of requests that will lose their rows."""
        requests = self._runner.input_batch
        for name, row in requests.req_id_to_index.items():
            if name not in staying:
                said = slice(int(requests.num_prompt_tokens[row]), int(requests.num_tokens_no_spec[row]))
                self._runner.requests[name].output_token_ids[:] = requests.token_ids_cpu[row, said].tolist()

    def _cached(
        self, delta: StepDelta, names: Sequence[str], batch: StepBatch, places: Sequence[int]
    ) -> CachedRequestData:
        """Return the data of known requests at these places of a step, for the runner."""
        found = CachedRequestData.make_empty()
        for place in places:
            num_prompt = self._runner.requests[names[place]].num_prompt_tokens
            found.req_ids.append(names[place])
            found.new_block_ids.append(delta.blocks.get(place))
            found.num_computed_tokens.append(int(batch.starts[place]))
            found.num_output_tokens.append(max(int(batch.base_lens[place]) - num_prompt, 0))
        return found


def _chains(names: Sequence[str], counts: IntpArray) -> dict[str, list[int]]:
    """Return, for each request, as many tokens as rows after its own, i64[n].

    Requests without such rows are left out. The token values are not used (`token_injection`).
    """
    any_tokens = [[ANY_TOKEN] * count for count in range(int(counts.max()) + 1)]
    return {name: any_tokens[count] for name, count in zip(names, counts.tolist(), strict=True) if count}

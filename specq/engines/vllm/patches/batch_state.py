"""What vLLM's first model runner keeps of its requests, kept up with arrays: where each stands, how far it has come,
and what it has said.

In each step the runner goes through all requests that it is told of, one by one. So it is told of those that have new
blocks, or were not in the step before; how far all others have come is written into its batch at once. The tokens that
a request has said stand in its row of the batch; the request's own list of them is kept only while it has none.
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

    rows, order  of the step that runs: the row of each of its requests in the runner's batch, and which request each
                 row has, i64[n]
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._num_groups = len(runner.kv_cache_config.kv_cache_groups)
        self._names: Sequence[str] = ()  # of the step that runs
        self._places: list[str] = []  # the same as they stand in the batch
        self.rows: IntpArray = np.zeros(0, np.intp)
        self.order: IntpArray = self.rows
        self._rows_there: torch.Tensor | None = None  # on the device; None: not copied yet, or in order

    def begin(self, delta: StepDelta, names: Sequence[str], batch: StepBatch) -> SchedulerOutput:
        """Write down how far a step's requests have come; return what the runner has to be told of it."""
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
        """Note where the requests of the step stand, once the runner has put them there."""
        requests = self._runner.input_batch
        if names is not self._names or not self.stand_still:
            self.rows = self._rows_of(names)
            self.order = self.rows.argsort()
            self._names, self._places, self._rows_there = names, list(requests.req_ids), None

    def rows_on(self, device: torch.device) -> torch.Tensor | None:
        """Return `rows` on the device, i64[n]; None: 0, 1, 2 and so on. Copied once for steps whose requests stand in
        the same places."""
        if self._rows_there is None and not are_all(self.rows):
            self._rows_there = to_device(self.rows, device)
        return self._rows_there

    def say(self, names: Sequence[str], lengths: IntpArray, counts: IntpArray, token_ids: Int32Array) -> None:
        """Let requests, those that are there still, go on with tokens: counts i64[n] of each, token_ids i32[all];
        `lengths` i64[n]: how many it had."""
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
        """Write what was said into the rows of the batch; see `say`. `some_absent`: some rows are -1."""
        requests = self._runner.input_batch
        width = requests.token_ids_cpu.shape[1]
        at, of_each = lengths, rows
        if len(token_ids) > len(rows):
            at, of_each = lengths.repeat(counts) + places_in_runs(counts), rows.repeat(counts)
        ends = lengths + counts
        if some_absent or int(ends.max(initial=0)) > width:  # the last token need not fit
            fits = (of_each >= 0) & (at < width)
            at, of_each, token_ids = at[fits], of_each[fits], token_ids[fits]
            rows, ends = rows[rows >= 0], np.minimum(ends[rows >= 0], width)
        requests.token_ids_cpu[of_each, at] = token_ids
        requests.is_token_ids[of_each, at] = True
        requests.num_tokens_no_spec[rows] = np.maximum(requests.num_tokens_no_spec[rows], ends)

    def _come_to(self, rows: IntpArray, batch: StepBatch, some_absent: bool) -> None:
        """Write into the rows of the batch where a step's requests stand; see `_write`."""
        requests, starts, ends = self._runner.input_batch, batch.starts, batch.base_lens
        if some_absent:
            starts, ends, rows = starts[rows >= 0], ends[rows >= 0], rows[rows >= 0]
        requests.num_computed_tokens_cpu[rows] = starts
        requests.num_tokens_no_spec[rows] = np.maximum(ends, requests.num_prompt_tokens[rows])

    def _rows_of(self, names: Sequence[str]) -> IntpArray:
        """Return the rows of requests as they are now, i64[n]; -1 for those without one."""
        requests = self._runner.input_batch
        if names is self._names and self.stand_still:
            return self.rows
        return np.array([requests.req_id_to_index.get(name, -1) for name in names], np.intp)

    def _keep_lists(self, staying: set[str]) -> None:
        """Write down what requests have said that will lose their rows."""
        requests = self._runner.input_batch
        for name, row in requests.req_id_to_index.items():
            if name not in staying:
                said = slice(int(requests.num_prompt_tokens[row]), int(requests.num_tokens_no_spec[row]))
                self._runner.requests[name].output_token_ids[:] = requests.token_ids_cpu[row, said].tolist()

    def _cached(
        self, delta: StepDelta, names: Sequence[str], batch: StepBatch, places: Sequence[int]
    ) -> CachedRequestData:
        """Return what the runner is told of known requests at these places of a step."""
        found = CachedRequestData.make_empty()
        for place in places:
            num_prompt = self._runner.requests[names[place]].num_prompt_tokens
            found.req_ids.append(names[place])
            found.new_block_ids.append(delta.blocks.get(place))
            found.num_computed_tokens.append(int(batch.starts[place]))
            found.num_output_tokens.append(max(int(batch.base_lens[place]) - num_prompt, 0))
        return found


def _chains(names: Sequence[str], counts: IntpArray) -> dict[str, list[int]]:
    """Return as many tokens for each request as it has rows behind its own, i64[n], where it has some; none of them
    counts (`token_injection`)."""
    any_tokens = [[ANY_TOKEN] * count for count in range(int(counts.max()) + 1)]
    return {name: any_tokens[count] for name, count in zip(names, counts.tolist(), strict=True) if count}

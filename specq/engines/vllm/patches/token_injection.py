"""Insert tokens that vLLM does not know into a step's rows: drafts, and tokens only on the device.

They are inserted where vLLM fills in the tokens that it knows. So its own tables never hold a draft token. Requests
with drafts need no update message. A worker in its own process waits for late tokens (`late_tokens`) when all else is
ready.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from specq.engines.vllm.late_tokens import TokenReceiver
from specq.engines.vllm.patches.batch_state import BatchState
from specq.engines.vllm.rows import are_all, first_rows
from specq.protocol import Int32Array, IntpArray
from specq.verification import DeviceTokens, StepBatch, is_handle, places_in_runs, places_of, without_handles
from specq.verification.transfers import to_device

FILL = "_prepare_input_ids"  # the method with which vLLM's runner fills in a step's tokens
FORWARD = "_model_forward"  # the method with which it launches the model


class _Waiting(NamedTuple):
    """A step whose rows are filled in next.

    It has the step's requests, and the previous step's tokens, i32[judged] on the device. `late` is as in `StepDelta`.
    """

    batch: StepBatch
    names: list[str]
    tokens: torch.Tensor | None
    late: int


class _Late(NamedTuple):
    """Rows whose tokens a step waits for, the places of these tokens, and `late` as in `StepDelta`."""

    drafted: DeviceTokens
    rows: IntpArray
    places: IntpArray
    number: int


class TokenInjection:
    """Replaces `FILL` of `runner`, and `FORWARD` if tokens may come late."""

    def __init__(self, runner: Any, batch_state: BatchState, receiver: TokenReceiver | None = None) -> None:
        self._input_ids, self._batch_state, self._fill = runner.input_ids, batch_state, getattr(runner, FILL)
        self._waiting: _Waiting | None = None
        self._late: _Late | None = None
        self._receiver, self._forward = receiver, getattr(runner, FORWARD)
        setattr(runner, FILL, self._fill_and_feed)
        if receiver is not None:
            setattr(runner, FORWARD, self._await_and_forward)

    def prepare(self, batch: StepBatch, names: list[str], tokens: torch.Tensor | None, late: int = 0) -> None:
        """Announce the next step, which begins with some `tokens` of the one before, see `StepBatch.fed_by`.

        `late` as in `StepDelta`.
        """
        assert self._waiting is None, "vLLM's runner has filled no tokens in"
        if batch.fed_by is not None or len(batch.parents):
            self._waiting = _Waiting(batch, names, tokens, late)

    def feed_all(self, num: int) -> None:
        """Start each of `num` rows, one per request, with the token of the step before. The step has no drafts."""
        assert self._waiting is not None
        tokens, self._waiting = self._waiting.tokens, None
        assert tokens is not None
        into, rows = self._input_ids.gpu[:num], self._batch_state.rows_on(tokens.device)
        if rows is None:
            into.copy_(tokens)
        else:
            into.index_copy_(0, rows, tokens)

    def _fill_and_feed(self, output: SchedulerOutput, *arguments: Any, **options: Any) -> None:
        if self._waiting is None:
            self._fill(output, *arguments, **options)
            return
        (batch, names, tokens, late), self._waiting = self._waiting, None
        self._batch_state.settle(names)
        sizes = np.array([output.num_scheduled_tokens[name] for name in names], np.intp)
        firsts = first_rows(sizes, self._batch_state.order)
        rows = _node_rows(batch, firsts)
        drafted = batch.node_tokens
        self._input_ids.np[rows] = without_handles(drafted)
        self._fill(output, *arguments, **options)
        if batch.fed_by is not None:
            is_fed = batch.fed_by >= 0
            assert tokens is not None
            self._put(firsts[is_fed], tokens, batch.fed_by[is_fed])
        if batch.drafted is not None:
            is_unread = is_handle(drafted)
            unread = rows[is_unread], places_of(drafted[is_unread])
            if late:
                self._late = _Late(batch.drafted, *unread, late)
            else:
                self._put(unread[0], batch.drafted.tokens, unread[1])

    def _await_and_forward(self, *arguments: Any, **options: Any) -> Any:
        """Launch the model when the tokens that the step waits for have arrived."""
        late, self._late = self._late, None
        if late is not None:
            assert self._receiver is not None
            found = self._receiver.take(late.number)
            late.drafted.read(found)
            tokens = np.maximum(found[late.places], 0)  # any token where there is none: its row is rejected
            self._put(late.rows, to_device(tokens, self._input_ids.gpu.device), np.arange(len(tokens)))
        return self._forward(*arguments, **options)

    def _put(self, rows: IntpArray, tokens: torch.Tensor, places: Int32Array | IntpArray) -> None:
        """Put the tokens at these places, which are on the device, into rows."""
        into = self._input_ids.gpu
        if len(places) != len(tokens) or not are_all(places):
            tokens = tokens[to_device(places.astype(np.int64), tokens.device)]
        if are_all(rows):
            into[: len(rows)].copy_(tokens, non_blocking=True)
        else:
            into[to_device(rows, into.device)] = tokens.to(into.dtype)


def _node_rows(batch: StepBatch, firsts: IntpArray) -> IntpArray:
    """Return the rows of all nodes, i64[nodes]. The rows of each session begin at `firsts` i64[n]."""
    return (firsts + batch.num_tokens).repeat(batch.num_nodes) + places_in_runs(batch.num_nodes)

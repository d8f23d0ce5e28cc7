"""Tokens that vLLM does not know of, put into a step's rows where it fills in those that it knows: drafted ones, and those that only the device knows.

So its own tables never hold a token that was drafted, and requests with drafts need not be told of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from specq.engines.vllm.books import RunnerBooks
from specq.protocol import Int32Array, IntpArray
from specq.verification import StepBatch, ends_of, is_handle, places_in_runs, places_of, without_handles
from specq.verification.transfers import to_device

FILL = "_prepare_input_ids"  # the method with which vLLM's runner fills a step's tokens in


class _Waiting(NamedTuple):
    """A step whose rows are filled in next: its requests, and what the one before says, i32[judged] on the device."""

    batch: StepBatch
    names: list[str]
    tokens: torch.Tensor | None


class Feeding:
    """Stands in for `FILL` of `runner`."""

    def __init__(self, runner: Any, books: RunnerBooks) -> None:
        self._input_ids, self._books, self._fill = runner.input_ids, books, getattr(runner, FILL)
        self._waiting: _Waiting | None = None
        setattr(runner, FILL, self._fill_and_feed)

    def prepare(self, batch: StepBatch, names: list[str], tokens: torch.Tensor | None) -> None:
        """Let the next step be this one: it begins with some `tokens` of the one before, as `StepBatch.fed_by` says."""
        assert self._waiting is None, "vLLM's runner has filled no tokens in"
        if batch.fed_by is not None or len(batch.parents):
            self._waiting = _Waiting(batch, names, tokens)

    def _fill_and_feed(self, output: SchedulerOutput, *arguments: Any, **options: Any) -> None:
        if self._waiting is None:
            self._fill(output, *arguments, **options)
            return
        (batch, names, tokens), self._waiting = self._waiting, None
        self._books.settle(names)
        sizes = np.array([output.num_scheduled_tokens[name] for name in names], np.intp)
        firsts = _first_rows(sizes, self._books.order)
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
            self._put(rows[is_unread], batch.drafted.tokens, places_of(drafted[is_unread]))

    def _put(self, rows: IntpArray, tokens: torch.Tensor, places: Int32Array | IntpArray) -> None:
        """Put the tokens at these places, which are on the device, into rows."""
        into = self._input_ids.gpu
        if len(places) != len(tokens) or not _are_all(places):
            tokens = tokens[to_device(places.astype(np.int64), tokens.device)]
        if _are_all(rows):
            into[: len(rows)].copy_(tokens, non_blocking=True)
        else:
            into[to_device(rows, into.device)] = tokens.to(into.dtype)


def _node_rows(batch: StepBatch, firsts: IntpArray) -> IntpArray:
    """Return the rows of all nodes, i64[nodes], where those of each session begin at `firsts` i64[n]."""
    return (firsts + batch.num_tokens).repeat(batch.num_nodes) + places_in_runs(batch.num_nodes)


def _first_rows(sizes: IntpArray, order: IntpArray) -> IntpArray:
    """Return where each request's rows begin, i64[n], given their numbers and which request comes when."""
    found = np.empty_like(sizes)
    found[order] = ends_of(sizes[order]) - sizes[order]
    return found


def _are_all(places: IntpArray | Int32Array) -> bool:
    """Return whether these are 0, 1, 2 and so on."""
    return np.array_equal(places, np.arange(len(places)))

"""Tokens that only the device knows, put into a step's rows where vLLM has put what the host knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from specq.engines.vllm.books import RunnerBooks
from specq.protocol import Int32Array, IntpArray
from specq.verification import ends_of
from specq.verification.transfers import to_device

FILL = "_prepare_input_ids"  # the method with which vLLM's runner fills a step's tokens in


class Feeding:
    """Stands in for `FILL` of `runner`."""

    def __init__(self, runner: Any, books: RunnerBooks) -> None:
        self._input_ids, self._books, self._fill = runner.input_ids, books, getattr(runner, FILL)
        self._waiting: tuple[Int32Array, torch.Tensor, list[str]] | None = None
        setattr(runner, FILL, self._fill_and_feed)

    def prepare(self, fed_by: Int32Array | None, tokens: torch.Tensor | None, names: list[str]) -> None:
        """Let the next step begin with `tokens` i32[judged] of the one before, as `StepBatch.fed_by` says; `names`: its requests."""
        assert self._waiting is None, "vLLM's runner has filled no tokens in"
        if fed_by is not None:
            assert tokens is not None
            self._waiting = fed_by, tokens, names

    def _fill_and_feed(self, output: SchedulerOutput, *arguments: Any, **options: Any) -> None:
        self._fill(output, *arguments, **options)
        if self._waiting is None:
            return
        (fed_by, tokens, names), self._waiting = self._waiting, None
        self._books.settle(names)
        sizes = np.array([output.num_scheduled_tokens[name] for name in names], np.intp)
        is_fed = fed_by >= 0
        into = _first_rows(sizes, self._books.order)[is_fed]
        feeders, rows = fed_by[is_fed], self._input_ids.gpu
        if len(feeders) != len(tokens) or not _are_all(feeders):
            tokens = tokens[to_device(feeders.astype(np.int64), tokens.device)]
        if _are_all(into):
            rows[: len(into)].copy_(tokens, non_blocking=True)
        else:
            rows[to_device(into, rows.device)] = tokens


def _first_rows(sizes: IntpArray, order: IntpArray) -> IntpArray:
    """Return where each request's rows begin, i64[n], given their numbers and which request comes when."""
    found = np.empty_like(sizes)
    found[order] = ends_of(sizes[order]) - sizes[order]
    return found


def _are_all(places: IntpArray | Int32Array) -> bool:
    """Return whether these are 0, 1, 2 and so on."""
    return np.array_equal(places, np.arange(len(places)))

"""Passes of an EAGLE-3 head that are recorded on a GPU, or run as they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.trees.interface import TreeRequest
from tests.drafting.eagle3.plain_eagle import (
    EVERYTHING,
    GREEDY,
    SAMPLED,
    Known,
    Text,
    check,
    head,
    made,
    observe,
    plain,
    target,
)
from tests.replaying import StandIn

__all__ = ["head", "made", "plain", "target"]  # fixtures


def test_kernels_that_do_not_run_are_done_without(plain: EagleHead) -> None:
    """It is said once, at the start; trees are those of torch then."""
    replays = StandIn()
    head = Eagle(plain, replays)
    assert head._recorded is not None

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such instruction")

    head._recorded._passes._kernels = SimpleNamespace(texts=fail, trees=fail, most_ranked=16)  # type: ignore[assignment]
    with structlog.testing.capture_logs() as logs:
        head.warm_up(2, (), lambda _: [(3, 5, 2)])
    assert [entry["event"] for entry in logs] == ["head_kernels_failed"]
    recorded, text = replays.num_recorded, Text(1, 20)
    observe(head, text.states, [text.part(0, 1, 9)])
    check(head, plain, {0: (text, 9, 1)}, depth=3, sizes=(3, 5, 2))
    assert replays.num_recorded == recorded
    head._recorded._passes._cache.read = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="no such instruction"):
        head.warm_up(4, (), lambda _: [(3, 5, 2)])


def test_passes_are_recorded_once(plain: EagleHead) -> None:
    """A shape's first batch, or the warm-up; after that they are replayed, near the end of a text too, until the cache
    moves."""
    replays = StandIn()
    head = Eagle(plain, replays)
    text = Text(1, 400)
    head.warm_up(2)
    observe(head, text.states, [text.part(i, 1, 3) for i in range(2)])
    for depth in (4, 2):
        head.start([TreeRequest([0, 1], [GREEDY, SAMPLED], depth, None, EVERYTHING)])[0].collect()
    recorded, replayed = replays.num_recorded, replays.num_replayed
    for end in range(4, 9):
        observe(head, text.states, [text.part(i, 1, end) for i in range(2)])
        head.start([TreeRequest([0, 1], [GREEDY, SAMPLED], max(8 - end, 1), None, EVERYTHING)])[0].collect()
    assert (replays.num_recorded, replays.num_replayed - replayed) == (recorded, 10)
    observe(head, text.states, [text.part(i, 1, 400) for i in range(2, 9)])
    check(head, plain, {0: (text, 8, 1)})


def test_passes_of_any_shape_leave_out_attention_that_plans_each(
    plain: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is cuDNN's. Recorded passes may have it; jobs whose sampling cuts have trees that are not recorded."""
    seen, attention = list[bool](), torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    text = Text(1, 40)
    for replays, params, expected in (
        (None, GREEDY, {False}),
        (StandIn(), GREEDY, {True}),
        (StandIn(), replace(SAMPLED, top_k=3), {True, False}),
    ):
        head = Eagle(plain, replays)
        observe(head, text.states, [text.part(0, 1, 30)])
        seen.clear()
        head.start([TreeRequest([0], [params], 3, None, EVERYTHING)])[0].collect()
        assert set(seen) == expected


def test_what_cannot_be_recorded_is_run_as_it_is(plain: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for a recording costs time, and no trees; it is logged."""
    replays, texts = StandIn(), [Text(seed, 20) for seed in range(2)]
    head = Eagle(plain, replays)
    known: Known = {i: (text, 9, 1) for i, text in enumerate(texts)}
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 9)])
    check(head, plain, {0: known[0]})

    def fail(work: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(replays, "_record", fail)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            check(head, plain, known)
            check(head, plain, {1: known[1]})
    assert [entry["event"] for entry in logs] == ["cuda_graph_capture_failed"]

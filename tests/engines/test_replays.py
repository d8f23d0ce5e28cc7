"""What work of fixed shapes asks of torch, without a GPU: which memory recordings share, and how one that failed is
left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from specq.engines.torch import Replays


class Torch:
    """Stands in for torch's recordings. As in torch 2.11, one that fails stays on its stream, and its memory goes on to
    be recorded to; and memory of which no graph is left is refused."""

    def __init__(self) -> None:
        self.num_pools, self.stream, self.is_recording, self.fails = 0, "usual", False, False
        self.graphs: list[Any] = []

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    def graph(self, graph: Any, *, pool: object, capture_error_mode: str) -> Torch:
        assert not self.is_recording, "captures_underway.empty() INTERNAL ASSERT FAILED"
        assert capture_error_mode == "thread_local"
        self.graphs.append((graph, pool))
        return self

    def __enter__(self) -> None:
        self.stream, self.is_recording = "of recordings", True

    def __exit__(self, *_: object) -> None:
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stream, self.is_recording = "usual", False

    def set_stream(self, stream: Any) -> None:
        self.stream = stream.name

    def end(self, device: int, pool: object) -> None:
        assert device == 0
        if not self.is_recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_recording = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    found = Torch()
    for name in ("graph_pool_handle", "graph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    stream = SimpleNamespace(name="usual", device_index=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end)
    return found


def test_recordings_share_memory_until_they_are_forgotten(fake: Torch) -> None:
    """Then they get other memory: torch may refuse a pool whose graphs are all deleted."""
    replays = Replays(torch.device("cpu"), uses_graphs=True)
    for key in ("a", "b", "a"):
        replays.run(key, lambda: torch.ones(2))
    replays.forget()
    replays.run("a", lambda: torch.ones(2))
    assert [pool for _, pool in fake.graphs] == [(0, 1), (0, 1), (0, 2)]


@pytest.mark.parametrize("is_left_open", [True, False])
def test_a_recording_that_failed_is_left(fake: Torch, *, is_left_open: bool) -> None:
    """The work is done as it is from then on; others may record, and free memory."""
    replays = Replays(torch.device("cpu"), uses_graphs=True)
    fake.fails = is_left_open

    def work() -> torch.Tensor:
        if fake.is_recording and not is_left_open:
            raise RuntimeError("not while recording")
        return torch.ones(2)

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert replays.run("a", work).tolist() == [1, 1]
    assert [entry["event"] for entry in logs] == ["cuda_graph_capture_failed"]
    assert (fake.stream, fake.is_recording, len(fake.graphs)) == ("usual", False, 1)

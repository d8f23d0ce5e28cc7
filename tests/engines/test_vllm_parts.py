"""The parts of the vllm engine that need no vLLM."""

from __future__ import annotations

import itertools
import os

import pytest
import structlog

from specq.engines.vllm import versions
from specq.engines.vllm.options import _WISHED, prepare_environment
from specq.engines.vllm.room import free_slots


def fits(num_free: int, block_size: int, slacks: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether so many rows of each session fit, blocks counted one by one."""
    taken = sum(-(-max(0, count - slack) // block_size) for count, slack in zip(rows, slacks, strict=True))
    return taken <= num_free


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("num_free", [0, 1, 2, 4])
@pytest.mark.parametrize("slacks", [(0,), (2,), (0, 0), (1, 2), (5, 0, 1)])
def test_free_slots_fit_however_they_are_divided_and_no_more_do(num_free, block_size, slacks):
    found = free_slots(num_free, block_size, slacks)
    most = found + 2
    divided = [rows for rows in itertools.product(range(most), repeat=len(slacks)) if sum(rows) < most]
    assert all(fits(num_free, block_size, slacks, rows) for rows in divided if sum(rows) <= found)
    assert not all(fits(num_free, block_size, slacks, rows) for rows in divided if sum(rows) == found + 1)


def test_without_sessions_all_blocks_are_free():
    assert free_slots(7, 16, ()) == 112


def test_tested_versions_are_driven_as_they_were_tested(monkeypatch):
    monkeypatch.setitem(versions.TESTED, "9.9.0", ("prompts",))
    with structlog.testing.capture_logs() as logs:
        assert versions.ways_to_try("9.9.0+cpu") == ("prompts",)
    assert logs == []


def test_an_untested_version_is_tried_and_told():
    with structlog.testing.capture_logs() as logs:
        assert versions.ways_to_try("0.99.1") == ("sessions", "prompts")
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["version"]) == ("vllm_untested", "warning", "0.99.1")
    assert "0.32.0" in entry["tested"]


@pytest.mark.parametrize(
    ("visible", "device", "count", "shown"),
    [
        ("", "cuda:1", 1, "1"),
        ("", "cuda:2", 2, "2,3"),
        ("4,6,7", "cuda:1", 2, "6,7"),
        ("4,6", "cuda", 1, "4,6"),
        ("", "auto", 1, ""),
    ],
)
def test_vllm_sees_the_devices_that_it_shall_use(monkeypatch, visible, device, count, shown):
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "7")
    for name in _WISHED.keys() - {"VLLM_LOGGING_LEVEL"}:
        monkeypatch.setenv(name, "as it was")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    prepare_environment(device, count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
    assert (os.environ["VLLM_USE_V2_MODEL_RUNNER"], os.environ["VLLM_LOGGING_LEVEL"]) == ("0", "7")

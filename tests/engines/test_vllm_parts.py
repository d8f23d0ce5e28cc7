"""The parts of the vllm engine that need no vLLM."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch

from specq.engines.room import Slacks, free_slots, next_to_grow
from specq.engines.vllm import versions
from specq.engines.vllm.options import _NEEDED, _WISHED, drafter_options, prepare_environment, refusal
from specq.protocol import History, SamplingParams, ScoredRows, SessionStep
from specq.verification import StepBatch


def fits(num_free: int, block_size: int, slacks: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether so many rows of each session fit, blocks counted one by one."""
    taken = sum(-(-max(0, count - slack) // block_size) for count, slack in zip(rows, slacks, strict=True))
    return taken <= num_free


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("num_free", [0, 1, 2, 4])
@pytest.mark.parametrize("slacks", [(0,), (2,), (0, 0), (1, 2), (5, 0, 1)])
def test_free_slots_fit_however_they_are_divided_and_no_more_do(num_free, block_size, slacks):
    found = free_slots(num_free, block_size, np.array(slacks))
    most = found + 2
    divided = [rows for rows in itertools.product(range(most), repeat=len(slacks)) if sum(rows) < most]
    assert all(fits(num_free, block_size, slacks, rows) for rows in divided if sum(rows) <= found)
    assert not all(fits(num_free, block_size, slacks, rows) for rows in divided if sum(rows) == found + 1)


@pytest.mark.parametrize("slacks", [(2,), (40, 20), (20, 3, 40, 0)])
def test_sessions_may_be_added_while_each_can_have_a_block(slacks):
    added = Slacks.of(16, np.array(slacks[:1]))
    for i, slack in enumerate(slacks[1:], 2):
        added.add(slack)
        assert added.free_slots(5) == free_slots(5, 16, np.array(slacks[:i]))
    first = Slacks.of(16, np.zeros(0, np.intp))
    first.add(slacks[0])
    assert first == Slacks.of(16, np.array(slacks[:1]))


def test_without_sessions_all_blocks_are_free():
    assert free_slots(7, 16, np.zeros(0, np.intp)) == 112


@pytest.mark.parametrize(
    ("slacks", "most", "expected"),
    [
        ([3, 0, 9, 1], 2, [1, 3]),
        ([3, 0, 9, 1], 9, [1, 3, 0, 2]),
        ([15, 16, 31, 15], 9, [0, 3]),
        ([5, 5, 5], 2, [0, 1]),
        ([], 2, []),
    ],
)
def test_sessions_with_the_least_room_grow_first(slacks, most, expected):
    """A session with room for a whole block does not grow."""
    assert next_to_grow(np.array(slacks, np.intp), 16, most).tolist() == expected


def test_another_process_scores_no_rows_of_a_step_that_has_none():
    """Such a step may have other optional parts, here a history."""
    tokens = np.array([5, 6], np.int32)
    history = SessionStep(1, 0, tokens, SamplingParams(), history=History(2))
    scored = SessionStep(2, 0, tokens, SamplingParams(), scored=ScoredRows(tokens[1:], 3))
    found = pickle.loads(pickle.dumps(StepBatch.of([history, scored]))).scored
    assert [*found] == [1]
    assert found[1].token_ids.tolist() == [6]


def test_a_tested_version_is_not_warned_of():
    with structlog.testing.capture_logs() as logs:
        versions.warn_if_untested(f"{versions.TESTED[0]}+cpu")
    assert logs == []


def test_an_untested_version_is_warned_of():
    with structlog.testing.capture_logs() as logs:
        versions.warn_if_untested("0.99.1")
    (entry,) = logs
    assert (entry["event"], entry["log_level"], entry["version"]) == ("untested_vllm_detected", "warning", "0.99.1")
    assert "0.32.0" in entry["tested"]


def make_runner(**others: Any) -> SimpleNamespace:
    """Return what `can_count` looks at of a runner, as vLLM 0.26 and 0.32 have it, or with other parts."""
    counts = {name: torch.zeros(1) for name in versions.COUNTS}
    blocks = SimpleNamespace(commit_block_table=print, compute_slot_mapping=print)
    known = {"query_start_loc": SimpleNamespace(gpu=torch.zeros(2)), "input_batch": SimpleNamespace(block_table=blocks)}
    return SimpleNamespace(
        **{**counts, **known, **dict.fromkeys(versions.OTHER_INPUTS), "uses_xdrope_dim": 0, **others}
    )


@pytest.mark.parametrize(
    ("others", "can_count", "is_said"),
    [
        ({}, True, False),
        ({"uses_mrope": True}, False, False),
        ({"lora_config": object()}, False, False),
        ({"positions": SimpleNamespace(gpu=torch.zeros(1))}, False, True),  # as vLLM had it once
        ({"input_batch": SimpleNamespace(block_table=None)}, False, True),
    ],
    ids=["known", "three positions", "adapters", "other counts", "other blocks"],
)
def test_a_device_counts_on_where_the_runner_is_one_that_is_known(others, can_count, is_said):
    """Where it is not, that is said; where rows depend on something else, there is nothing to say."""
    with structlog.testing.capture_logs() as logs:
        assert versions.can_count(make_runner(**others)) == can_count
    assert [entry["event"] for entry in logs] == ["vllm_fast_path_disabled"] * is_said


@pytest.mark.parametrize(
    ("given", "count", "address"),
    [("", 1, "127.0.0.1"), ("10.0.0.7", 1, "10.0.0.7"), ("", 2, "")],
    ids=["alone", "given", "several workers"],
)
def test_a_single_worker_opens_no_network_rendezvous(monkeypatch, given, count, address):
    """Torch resolves its rendezvous address by name, and warns if there is no name."""
    for name in (*_NEEDED, *_WISHED):
        monkeypatch.setenv(name, os.environ.get(name, "as it was"))
    monkeypatch.setenv("VLLM_HOST_IP", given)
    if not given:
        monkeypatch.delenv("VLLM_HOST_IP")
    prepare_environment("auto", count)
    assert os.environ.get("VLLM_HOST_IP", "") == address


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
    for name in {*_WISHED, "VLLM_HOST_IP"} - {"VLLM_LOGGING_LEVEL"}:
        monkeypatch.setenv(name, "as it was")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    prepare_environment(device, count)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
    assert (os.environ["VLLM_USE_V2_MODEL_RUNNER"], os.environ["VLLM_LOGGING_LEVEL"]) == ("0", "7")


@pytest.mark.parametrize(
    ("said", "helps"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "--max-model-len"),
        (
            "Free memory on device (3.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.9)",
            "a lower --gpu-memory",
        ),
        ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "a higher --gpu-memory"),
        ("To serve at least one request, 24.0 GiB KV cache is needed", "a higher --gpu-memory"),
        (
            "WorkerProc initialization failed due to an exception. See stack trace for root cause.",
            "--tensor-parallel-size 1",
        ),
    ],
)
def test_an_out_of_memory_start_says_what_to_change(said: str, helps: str) -> None:
    told = refusal("big", RuntimeError(f"{said}\n"))
    assert told.startswith("vLLM cannot run big so: ")
    assert helps in told
    assert "\n" not in told


def test_a_refusal_says_what_is_behind_it() -> None:
    """Engines wrap their errors; the one behind may be what says why."""
    outer = RuntimeError("Engine core initialization failed")
    outer.__cause__ = MemoryError("CUDA out of memory")
    assert "initialization failed; CUDA out of memory. Weights" in refusal("big", outer)


def test_a_refusal_names_the_heads() -> None:
    said = refusal("big", ValueError("Unsupported speculative method: 'mtp'"), "mtp")
    assert said.startswith(
        "vLLM cannot run big with the heads mtp so: Unsupported speculative method: 'mtp'. The target"
    )
    assert said.endswith("leave --heads out, or name a directory of heads")


@pytest.mark.parametrize(("size", "levels"), [(5, 4), (9, 8), (16, 8), (None, 8)])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_block_is_no_longer_than_its_drafter_was_trained_for(
    tmp_path: Path, size: int | None, levels: int, is_inside: bool
) -> None:
    own = {} if size is None else {"block_size": size}
    said = {"dflash_config": own} if is_inside else own | {"dflash_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = drafter_options(str(tmp_path), 8)["speculative_config"]
    assert (found["method"], found["num_speculative_tokens"]) == ("dflash", levels)


def test_a_refusal_of_another_kind_has_no_advice() -> None:
    assert (
        refusal("big", ValueError("quantization fp7 is unknown"))
        == "vLLM cannot run big so: quantization fp7 is unknown"
    )

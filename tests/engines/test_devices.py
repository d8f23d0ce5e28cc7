"""Tests of vLLM run on the kind of device that it was built for, and say why where they do not run."""

from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from tests import devices


@pytest.mark.parametrize(
    ("device_type", "kind", "reason"),
    [
        (None, "", "vllm is not installed"),
        ("cpu", "cpu", ""),
        ("cuda", "cuda", ""),
        ("", "", "no device here"),
        ("xpu", "", "built for xpu; the tests know cpu and cuda"),
    ],
)
def test_the_device_matches_the_vllm_build(device_type, kind, reason):
    found = devices.choose(None if device_type is None else lambda: device_type)
    assert found.kind == kind
    assert reason in found.reason
    assert bool(found.kind) != bool(found.reason), "a test runs, or says why it does not"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_vllm_itself_is_asked(monkeypatch, device_type):
    """A CUDA build is never asked for the CPU."""
    monkeypatch.setattr(devices, "find_spec", lambda name: ModuleSpec(name, None))
    answer = SimpleNamespace(stdout=f"what vLLM says of itself\ntype={device_type}\n")
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: answer)
    assert devices.vllm_choice.__wrapped__() == (device_type, "")


@pytest.mark.parametrize(("gib", "share"), [(140, 0.057), (24, 0.333), (4, 0.9)])
def test_of_a_gpu_each_vllm_takes_a_small_share(monkeypatch, gib, share):
    memory = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
    options = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": devices.VLLM_KV_BYTES}
    assert devices.vllm_arguments("cuda") == {"dtype": "float32", "options": options}
    assert devices.vllm_arguments("cpu") == {}

"""What tests say of the device that they need, and which vLLM runs on here. `make test-gpu` runs both kinds on a GPU.

NEEDS_INTERPRETER  of tests of Triton kernels that run without a GPU, under TRITON_INTERPRET=1
NEEDS_CUDA    of tests that run on CUDA only
NEEDS_VLLM    of tests of real vLLM: they run on the kind of device that the installed one was built for, which the
              fixture `vllm_device` returns; it skips them where there is none
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
NEEDS_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
NEEDS_INTERPRETER = [
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
    ),
    pytest.mark.timeout(600),
    # it computes with NumPy, which speaks of what wraps and overflows
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
NEEDS_VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")]

VLLM_KINDS = ("cpu", "cuda")  # that tests know
VLLM_BYTES = 8 << 30  # of a GPU, for each vLLM of the tests: some are there at a time
VLLM_KV_BYTES = 1 << 30


class Choice(NamedTuple):
    """The kind of device that vLLM runs on, or the reason for a skip."""

    kind: str = ""
    reason: str = ""


def choose(device_type: Callable[[], str] | None) -> Choice:
    """Return where to test vLLM, given its device type as a callable (None: vLLM is not installed)."""
    if device_type is None:
        return Choice(reason="vllm is not installed")
    kind = device_type()
    if not kind:
        return Choice(reason="vllm finds no device here of the kind that it was built for")
    if kind not in VLLM_KINDS:
        return Choice(reason=f"vllm was built for {kind}; the tests know {' and '.join(VLLM_KINDS)}")
    return Choice(kind)


@cache
def vllm_choice() -> Choice:
    """Return where to test the vLLM that is installed."""
    return choose(None if find_spec("vllm") is None else _device_type)


def _device_type() -> str:
    """Ask in a process of its own: one in which vLLM was imported hands a single core on to those that it starts."""
    code = (
        "from specq.engines.vllm.options import prepare_environment; prepare_environment('auto'); "
        "from vllm.platforms import current_platform; print(f'type={current_platform.device_type}')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    return asked.stdout.rpartition("type=")[2].strip()


def vllm_arguments(kind: str) -> dict[str, Any]:
    """Return what the vLLM engine or proposer is made with on a kind of device: float32, as what it is compared with,
    and of a GPU a small share only, which is not measured: vLLM refuses to where an engine of the test before is being
    freed."""
    if kind == "cpu":
        return {}  # float32 is the default there
    share = min(0.9, VLLM_BYTES / torch.cuda.get_device_properties(0).total_memory)
    return {
        "dtype": "float32",
        "options": {"gpu_memory_utilization": round(share, 3), "kv_cache_memory_bytes": VLLM_KV_BYTES},
    }

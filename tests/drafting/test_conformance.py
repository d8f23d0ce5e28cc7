"""Every drafter of the table, on each kind of device, does what a drafter must do."""

from __future__ import annotations

import pytest

from specq.drafting import DRAFTERS
from specq.testing import DrafterConformance, make_checkpoint
from tests.devices import NEEDS_CUDA, NEEDS_VLLM, vllm_arguments
from tests.drafting.fed import Fed, make_trees

# Each of the table on the CPU, what runs on CUDA there too; vllm on what it was built for.
DEVICES = {"vllm": NEEDS_VLLM, "draft-model on cuda": NEEDS_CUDA}


@pytest.fixture(params=[pytest.param(name, marks=DEVICES.get(name, ())) for name in sorted({*DRAFTERS, *DEVICES})])
def drafter(request, tmp_path):
    name, _, kind = request.param.partition(" on ")
    make = DRAFTERS.resolve(name).make
    if DRAFTERS.resolve(name).reads_target:
        yield Fed(make_trees(tmp_path, name))
        return
    if not DRAFTERS.resolve(name).needs_model:
        yield make()
        return
    directory = str(make_checkpoint("llama-bf16", tmp_path))
    if name != "vllm":
        yield make(directory, device=kind or "cpu")
        return
    made = make(directory, kv_slots=1024, **vllm_arguments(request.getfixturevalue("vllm_device")))
    yield made
    made.shutdown()


class TestConformance(DrafterConformance):
    """With the fixture above."""

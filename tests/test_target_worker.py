"""What the verifier's process makes of its configuration."""

from dataclasses import replace

import pytest

from specq.config import load
from workers.target import own_device


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [("torch", "cuda:1", "cuda:1"), ("vllm", "cuda:1", "cuda:0"), ("vllm", "cuda", "cuda:0"), ("vllm", "cpu", "cpu")],
)
def test_the_own_drafter_computes_where_the_engine_does(engine: str, device: str, expected: str) -> None:
    """vLLM lets its process see its own GPUs only, so that they are counted anew."""
    assert own_device(replace(load().target, engine=engine, device=device)) == expected

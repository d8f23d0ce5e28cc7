"""`specq worker --role target --engine vllm` over real sockets, beside the torch engine: the same text. `make test-vllm`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from specq import Client
from specq.addresses import free_address
from specq.client.result import Result
from specq.config import load
from specq.cpu import available_cores
from workers.up import Group, members

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
CORES = available_cores()
QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "Write a Python function that returns the sum of a list.",
    "What is the capital of France?",
)
ASKED = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "frequency_penalty": 0.5, "min_tokens": 20},
)


def answers(engine: str, *, drafters: int = 1, **options: object) -> list[Result]:
    """Return the results of a broker, a verifier with this engine, and drafters, as processes."""
    config = load()
    config = replace(
        config,
        up=replace(config.up, drafters=drafters),
        broker=replace(config.broker, bind=free_address()),
        target=replace(config.target, engine=engine, **options),
    )
    with Group(members(config, ["--log-level", "error"])) as group:
        group.wait_ready(240)
        with Client(group.address) as client:
            jobs = [
                client.submit(messages=[{"role": "user", "content": question}], seed=seed, max_tokens=40, **params)
                for params in ASKED
                for seed, question in enumerate(QUESTIONS)
            ]
            found = [job.result(120) for job in jobs]
        group.stop()
        codes = {process.returncode for process in group.processes.values()}
        assert codes == {0} or "tensor_parallel_size" in options  # vLLM's own workers take seconds to end
    return found


@pytest.fixture(scope="module", name="theirs")
def _theirs() -> list[Result]:
    """What the torch engine says."""
    return answers("torch")


def test_vllm_says_what_the_torch_engine_says(theirs: list[Result]) -> None:
    """Greedy and sampled, with drafts accepted and rejected."""
    ours = answers("vllm", max_model_len=1024, engine_options=("kv_cache_memory_bytes=268435456",))
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    accepted = sum(result.stats["accepted_tokens"] for result in ours)
    verified = sum(result.stats["draft_tokens"] for result in ours)
    assert 20 < accepted < verified


def test_vllm_verifies_what_its_own_process_drafts(theirs: list[Result]) -> None:
    """Chains of a draft model beside vLLM, in the verifier's process."""
    memory = "kv_cache_memory_bytes=268435456"
    ours = answers("vllm", drafters=0, draft_model="tiny", backup="none", max_model_len=1024, engine_options=(memory,))
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    accepted = sum(result.stats["accepted_tokens"] for result in ours)
    verified = sum(result.stats["draft_tokens"] for result in ours)
    assert 20 < accepted < verified


@pytest.mark.skipif(len(CORES) < 2, reason="vLLM wants a core for each worker")
def test_each_worker_judges_under_tensor_parallelism(theirs: list[Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, each with half of each layer and a judge of its own."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{CORES[0]}|{CORES[1]}")
    ours = answers("vllm", tensor_parallel_size=2, cores=CORES, engine_options=("kv_cache_memory_bytes=268435456",))
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]

"""`specq worker --role target --engine vllm` over real sockets, beside the torch engine on the same device: the same
text.

`make test-vllm`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specq import Client
from specq.client.result import Result
from specq.processes.up import Group
from specq.runtime.usage import available_cores
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from tests.deploying import group_of
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.overlapping import NUM

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
CORES = available_cores()
MEMORY = "kv_cache_memory_bytes=268435456"
QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "Write a Python function that returns the sum of a list.",
    "What is the capital of France?",
)
ASKED = (
    {"temperature": 0.0, "mode": "sync"},  # drafts are waited for, so that there are some however fast the target is
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "frequency_penalty": 0.5, "min_tokens": 20},
)


def start(engine: str, kind: str, *, drafters: int, **options: object) -> Group:
    """Return a broker, a verifier with this engine, and drafters, as processes, on a kind of device; in float32, which
    is the default on a CPU."""
    target = {"engine": engine, "device": kind, "dtype": "auto" if kind == "cpu" else "float32"} | options
    return group_of(up={"drafters": drafters}, target=target, draft={"device": kind})


def answers(engine: str, kind: str, *, drafters: int = 1, **options: object) -> list[Result]:
    """Return the results of such a group, which must end well."""
    with start(engine, kind, drafters=drafters, **options) as group:
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
        assert codes == {0} or "tensor_parallel_size=2" in options.get(
            "engine_options", ()
        )  # vLLM's own workers take seconds to end
    return found


@pytest.fixture(scope="module", name="theirs")
def _theirs(vllm_device: str) -> list[Result]:
    """What the torch engine says."""
    return answers("torch", vllm_device)


def vllm_answers(kind: str, own: dict[str, object] | None = None, **options: object) -> list[Result]:
    """Return the results with vLLM, which takes a small share of a GPU."""
    return answers("vllm", kind, engine_options=engine_options(kind, own or {}), **options)


def engine_options(kind: str, own: dict[str, object]) -> tuple[str, ...]:
    """Return options of the engine that leave room for other vLLMs beside it."""
    given = vllm_arguments(kind).get("options", {}) | own
    return (MEMORY, *(f"{name}={value}" for name, value in given.items()))


def test_vllm_says_what_the_torch_engine_says(theirs: list[Result], vllm_device: str) -> None:
    """Greedy and sampled, with drafts accepted and rejected."""
    ours = vllm_answers(vllm_device, {"max_model_len": 1024})
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    accepted = sum(result.stats["accepted_tokens"] for result in ours)
    verified = sum(result.stats["draft_tokens"] for result in ours)
    assert 20 < accepted < verified


def test_vllm_verifies_what_its_own_process_drafts(theirs: list[Result], vllm_device: str) -> None:
    """Chains of a draft model beside vLLM, in the verifier's process."""
    ours = vllm_answers(vllm_device, {"max_model_len": 1024}, drafters=0, draft_model="tiny", prompt_lookup="none")
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    accepted = sum(result.stats["accepted_tokens"] for result in ours)
    verified = sum(result.stats["draft_tokens"] for result in ours)
    assert 20 < accepted < verified


def test_vllms_own_drafter_changes_no_text(theirs: list[Result], vllm_device: str, tmp_path: Path) -> None:
    """A random EAGLE-3 head drafts within vLLM's steps. Its drafts are verified."""
    sizes = {"head_dim": 64, "num_key_value_heads": 2, "layers": (1, 5, 8), "max_position_embeddings": 2048}
    head = make_eagle(tmp_path / "head", eagle_shape_of(256, 4096, 400, **sizes))
    ours = vllm_answers(
        vllm_device, {"max_model_len": 1024}, drafters=0, heads=str(head), prompt_lookup="none", drafts="always"
    )
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    assert sum(result.stats["draft_tokens"] for result in ours) > 100


@pytest.fixture
def two_workers(vllm_device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a verifier is given that divides each layer among two processes of vLLM's."""
    there = {"cpu": len(CORES), "cuda": torch.cuda.device_count()}[vllm_device]
    if there < 2:
        pytest.skip(
            f"vLLM wants a {'core' if vllm_device == 'cpu' else 'GPU'} for each of two workers; here is {there}"
        )
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, CORES[:2])))
    return {"tensor_parallel_size": 2}


def test_each_worker_judges_under_tensor_parallelism(
    theirs: list[Result], vllm_device: str, two_workers: dict[str, object]
) -> None:
    """Two workers, each with half of each layer and a judge of its own."""
    ours = vllm_answers(vllm_device, two_workers, cores=CORES)
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]


def test_texts_are_the_same_with_a_step_in_flight_in_two_processes(
    vllm_device: str, two_workers: dict[str, object], tmp_path: Path
) -> None:
    """A worker launches a step, and a thread of its waits for the one before, while the host does other things. What
    fails in the second worker is not lost."""
    command = [sys.executable, "-m", "tests.engines.vllm_apart", str(tmp_path), vllm_device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    texts = json.loads(done.stdout.splitlines()[-1])
    assert texts["together"] == texts["apart"]
    for name in ("together", "apart"):
        assert texts["scored"][name] == pytest.approx(texts["scored"]["torch"], abs=1e-4)
    assert texts["most"] == 3
    assert texts["unread"] == texts["own"]
    assert texts["late"] > 5
    assert texts["accepted"] > 5
    assert len(texts["together"]) == NUM - 2
    assert "no judge" in texts["lost"]


def test_an_idle_verifier_exits_when_its_vllm_process_dies(vllm_device: str, two_workers: dict[str, object]) -> None:
    """It stops its heartbeats, exits with the error, is started again, and returns the same text as before."""
    options = engine_options(vllm_device, two_workers)
    group = start("vllm", vllm_device, drafters=0, cores=CORES, engine_options=options)
    with group, Client(group.address) as client:
        group.wait_ready(240)
        before = client.generate(QUESTIONS[0], max_tokens=20, ignore_eos=True)
        verifier = group.processes["target-1"]
        os.kill(worker_of(verifier.pid), signal.SIGKILL)
        assert verifier.wait(60) == 1
        group.check()
        group.wait_ready(240)
        assert client.generate(QUESTIONS[0], max_tokens=20, ignore_eos=True).token_ids == before.token_ids


def worker_of(pid: int) -> int:
    """Return one of the processes in which vLLM computes for a verifier, by the name that it gives them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in children if b"Worker" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(found) == 2, children
    return found[1]

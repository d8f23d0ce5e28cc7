"""What a deployment asks of vLLM reaches it, or is refused by name. `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specq.engines.torch.engine import TorchEngine
from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.options import make_options
from specq.protocol.errors import ConfigError
from specq.testing.checkpoints import VOCAB, make_checkpoint
from tests.devices import NEEDS_VLLM, vllm_arguments

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def own_environment(monkeypatch):
    """What is set for vLLM is unset after the test: which devices it sees, before all."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"options": {"gpu_memory_utilisation": 0.5}},
            "vLLM has no engine option gpu_memory_utilisation; did you mean 'gpu_memory_utilization'",
        ),
        ({"options": {"max_num_seqs": 5}}, "max_num_seqs is given by --max-sessions"),
        ({"options": {"scheduler_cls": "x.Y"}}, "scheduler_cls is set by specq"),
        ({"options": {"quantization": "none-such"}}, "vLLM cannot run .*none-such"),
        ({"dtype": "float8"}, "vLLM cannot run .*float8"),
    ],
)
@pytest.mark.usefixtures("vllm_device")
def test_options_that_vllm_does_not_take_are_named(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        VllmEngine(str(directory), **options)


@pytest.mark.usefixtures("own_environment")
def test_a_device_that_vllm_was_not_built_for_is_named(directory, vllm_device):
    other = {"cpu": "cuda:0", "cuda": "cpu"}[vllm_device]
    with pytest.raises(ConfigError, match=f"--device {other}: the installed vLLM runs on {vllm_device}"):
        VllmEngine(str(directory), device=other)


@pytest.mark.parametrize(
    ("given", "are_ours"),
    [
        ({}, True),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, True),
        ({"max_cudagraph_capture_size": 8}, False),
        ({"cudagraph_capture_sizes": [1, 2]}, False),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, False),
    ],
)
@pytest.mark.parametrize(("most_rows", "most_sessions"), [(325, 60), (4096, 300), (20, 20)])
def test_large_steps_have_graphs_unless_the_deployment_says_which(
    directory, vllm_device, given, are_ours, most_rows, most_sessions
):
    """As large as steps may be, up to 1,024 rows; also a step in which all sessions decode."""
    sizes = {"kv_slots": 0, "max_sessions": most_sessions, "max_step_rows": most_rows}
    options = make_options(directory, device=vllm_device, dtype="auto", given=given, **sizes)
    if not are_ours:
        assert {name: options[name] for name in given} == given
        return
    rows = options["cudagraph_capture_sizes"]
    assert rows[-1] == min(most_rows, 1024)
    assert most_sessions in rows
    assert rows == sorted(set(rows))
    assert "max_cudagraph_capture_size" not in options


def test_vllm_receives_no_speculative_config(directory, vllm_device):
    """A step of one row per session then has a full graph, as in vLLM alone. Only the verifier schedules."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from specq.engines.vllm.sessions import engine_config

    sizes = {"kv_slots": 64, "max_sessions": 4, "max_step_rows": 64}
    config = engine_config(make_options(directory, device=vllm_device, dtype="auto", given={}, **sizes))
    assert config.speculative_config is None
    assert CudagraphDispatcher(config).uniform_decode_query_len == 1
    assert not config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == "specq.engines.vllm.patches.scheduler.SessionScheduler"


def test_attention_on_latent_vectors_knows_of_drafts(directory, vllm_device, monkeypatch):
    """Else it computes chains as it computes prompts."""
    from vllm.config import ModelConfig

    from specq.engines.vllm.sessions import MAX_CHAIN, engine_config

    monkeypatch.setattr(ModelConfig, "use_mla", True)
    sizes = {"kv_slots": 64, "max_sessions": 4, "max_step_rows": 64}
    config = engine_config(make_options(directory, device=vllm_device, dtype="auto", given={}, **sizes))
    assert config.speculative_config.num_speculative_tokens == MAX_CHAIN


def test_options_of_the_deployment_reach_vllm(directory, vllm_device):
    options = {"max_model_len": 77, "block_size": 64, **vllm_arguments(vllm_device).get("options", {})}
    engine = VllmEngine(str(directory), options=options, dtype="float32", kv_slots=100, name="mine")
    assert (engine.info.max_length, engine.info.kv_slots, engine.info.name) == (77, 128, "mine")
    assert (engine.info.engine, engine.info.dtype, engine.info.vocab_size) == ("vllm", "float32", VOCAB)
    assert engine.info.fingerprint == TorchEngine(str(directory), device="cpu").info.fingerprint
    engine.shutdown()

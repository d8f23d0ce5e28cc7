"""What a deployment asks of vLLM reaches it, or is refused by name. `make test-vllm`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from specq.engines.torch_engine import TorchEngine
from specq.engines.vllm_engine import VllmEngine
from specq.errors import ConfigError
from tests.checkpoints import VOCAB, make_checkpoint

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"options": {"gpu_memory_utilisation": 0.5}},
            "vLLM has no engine option gpu_memory_utilisation; it has .*gpu_m",
        ),
        ({"options": {"max_num_seqs": 5}}, "max_num_seqs is given by --max-sessions"),
        ({"options": {"scheduler_cls": "x.Y"}}, "scheduler_cls is set by specq"),
        ({"options": {"quantization": "none-such"}}, "vLLM cannot run .*none-such"),
        ({"device": "cuda:0"}, "--device cuda:0: the vLLM that is installed runs on cpu"),
        ({"dtype": "float8"}, "vLLM cannot run .*float8"),
    ],
)
def test_options_that_vllm_does_not_take_are_named(directory, options, message):
    with pytest.raises(ConfigError, match=message):
        VllmEngine(str(directory), **options)


def test_options_of_the_deployment_reach_vllm(directory):
    engine = VllmEngine(str(directory), options={"max_model_len": 77, "block_size": 64}, kv_slots=100, name="mine")
    assert (engine.info.max_length, engine.info.kv_slots, engine.info.name) == (77, 128, "mine")
    assert (engine.info.engine, engine.info.dtype, engine.info.vocab_size) == ("vllm", "float32", VOCAB)
    assert engine.info.fingerprint == TorchEngine(str(directory), device="cpu").info.fingerprint
    engine.shutdown()

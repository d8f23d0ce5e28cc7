"""What is read from a checkpoint, and which architectures are taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specq.engines.checkpoint import fingerprint, resolve_checkpoint
from specq.engines.native.rows import RowPacker
from specq.engines.torch import loading
from specq.engines.torch.engine import TorchEngine
from specq.protocol.errors import ConfigError
from specq.testing.checkpoints import DECODER, VOCAB, load_reference, make_checkpoint, random_tokens, reference_logits
from specq.text import TOKENIZER_FILES


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_info_describes_the_checkpoint(llama, tmp_path):
    info = TorchEngine(str(llama), device="cpu", name="mine", kv_slots=100).info
    assert (info.name, info.dtype, info.engine) == ("mine", "float32", "torch")
    assert (info.vocab_size, info.num_tokens, info.max_length, info.kv_slots) == (VOCAB, VOCAB, 600, 100)
    assert info.eos_ids == (1,)
    assert info.tokenizer_hash == ""
    same = make_checkpoint("llama", tmp_path / "same")
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    assert fingerprint(same) == info.fingerprint != fingerprint(other)


def test_several_eos_ids_are_read(tmp_path):
    assert TorchEngine(str(make_checkpoint("opt", tmp_path)), device="cpu").info.eos_ids == (1, 3)


def make_other(directory: Path, model_type: str, **settings) -> Path:
    """Save a random model of an architecture that the suite does not cover otherwise."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None} | settings
    config = AutoConfig.for_model(model_type, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}),
        ("mistral", {**DECODER, "sliding_window": 8}),
        ("gemma2", {**DECODER, "sliding_window": None, "attn_logit_softcapping": 5.0}),
        (
            "gptj",
            {"n_embd": 40, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        ),  # attention of its own, which sees no kept keys
        ("mpt", {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64, "max_position_embeddings": 64}),
    ],
)
def test_architectures_that_would_be_wrong_are_refused(tmp_path, model_type, settings):
    with pytest.raises(ConfigError, match="supported are llama, opt, qwen2, qwen3"):
        TorchEngine(str(make_other(tmp_path, model_type, **settings)), device="cpu")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("mistral", {**DECODER, "sliding_window": None}), ("gpt2", {"n_layer": 2, "n_head": 2, "n_embd": 32})],
)
def test_others_with_plain_attention_work(tmp_path, model_type, settings):
    directory = make_other(tmp_path, model_type, **settings)
    token_ids = random_tokens(np.random.default_rng(9), 20).tolist()
    packer = RowPacker()
    packer.add_session(np.arange(20, dtype=np.int32))
    packer.add_chain(token_ids, range(20), 0, judged=True)
    logits = loading.load(str(directory), device="cpu", kv_slots=64).forward(packer.pack()).logits
    expected = reference_logits(load_reference(directory), token_ids)
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["figs", "cuda:99", "meta", "cpu:x", ""])
def test_a_device_that_is_not_there_is_named(llama, device):
    with pytest.raises(ConfigError, match=f"device is '{device}'; torch has here .*cpu, or give auto"):
        TorchEngine(str(llama), device=device)


def test_a_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no causal language model"):
        TorchEngine(str(tmp_path), device="cpu")


@pytest.mark.parametrize("left", [0, 8, 100, 0.5])
def test_weights_that_were_cut_are_a_config_error(tmp_path, left):
    """As a download that broke leaves them."""
    weights = make_checkpoint("llama", tmp_path) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(left * len(data)) if isinstance(left, float) else left])
    with pytest.raises(ConfigError, match=r"no causal language model that transformers can load: .*header"):
        TorchEngine(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 41},
        {"head_dim": -1},
        {"hidden_act": "x"},
    ],
    ids=str,
)
def test_a_config_of_no_model_is_a_config_error(tmp_path, changes):
    path = make_checkpoint("llama", tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match="no causal language model that transformers can load"):
        TorchEngine(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["num_hidden_layers", "max_position_embeddings", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("size", [0, -1, "x", 2.5])
def test_a_size_that_no_model_has_is_named(tmp_path, name, size):
    path = make_checkpoint("llama", tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: size}))
    with pytest.raises(
        ConfigError, match=rf"config\.json: {name} is {re.escape(repr(size))}; it must be an integer of at least 1"
    ):
        TorchEngine(str(tmp_path), device="cpu")


def test_tensors_that_are_missing_are_not_made_up(tmp_path):
    """Transformers takes random ones, and says so in a table."""
    path = make_checkpoint("llama", tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.input_layernorm\.weight is missing \(9 are\)"):
        TorchEngine(str(tmp_path), device="cpu")


def test_a_model_of_the_hub_is_fetched_with_its_chat_templates(monkeypatch, tmp_path):
    asked: list[str] = []
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, allow_patterns: asked.extend(allow_patterns) or tmp_path
    )
    assert resolve_checkpoint("someone/model") == tmp_path
    assert list(huggingface_hub.utils.filter_repo_objects(TOKENIZER_FILES, allow_patterns=asked)) == [*TOKENIZER_FILES]

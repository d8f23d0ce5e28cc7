"""What is read from a checkpoint, and which architectures are taken."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from specq.engines.checkpoint import fingerprint, resolve_checkpoint
from specq.engines.torch import loading
from specq.engines.torch.engine import TorchEngine
from specq.protocol.errors import ConfigError
from specq.testing.checkpoints import (
    DECODER,
    VOCAB,
    chain_logits,
    load_reference,
    make_checkpoint,
    random_tokens,
    reference_logits,
    save_random,
)
from specq.text import TOKENIZER_FILES
from tests.each import each


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_info_describes_the_checkpoint(llama, tmp_path):
    info = TorchEngine(str(llama), device="cpu", name="mine", kv_slots=100).info
    assert (info.name, info.dtype, info.engine) == ("mine", "float32", "torch")
    assert (info.vocab_size, info.num_tokens, info.max_length, info.kv_slots) == (VOCAB, VOCAB, 600, 100)
    assert info.eos_ids == (1,)
    assert TorchEngine(str(make_checkpoint("opt", tmp_path / "opt")), device="cpu").info.eos_ids == (1, 3)
    assert info.tokenizer_hash == ""
    same = make_checkpoint("llama", tmp_path / "same")
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    assert fingerprint(same) == info.fingerprint != fingerprint(other)


def make_other(directory: Path, model_type: str, **settings) -> Path:
    """Save a random model of an architecture that the suite does not cover otherwise."""
    usual = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None}
    return save_random(directory, {"model_type": model_type} | usual | settings)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}),
        ("mistral", {**DECODER, "sliding_window": 8}),
        ("gemma2", {**DECODER, "sliding_window": None, "attn_logit_softcapping": 5.0}),
        ("gptj", {"n_embd": 40, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),  # its own attention sees no kept keys
        ("mpt", {"d_model": 32, "n_layers": 1, "n_heads": 2, "max_seq_len": 64, "max_position_embeddings": 64}),
    ],
)
def test_architectures_that_would_be_wrong_are_refused(tmp_path, model_type, settings):
    with pytest.raises(ConfigError, match="supported: llama, opt, qwen2, qwen3"):
        TorchEngine(str(make_other(tmp_path, model_type, **settings)), device="cpu")


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("mistral", {**DECODER, "sliding_window": None}), ("gpt2", {"n_layer": 2, "n_head": 2, "n_embd": 32})],
)
def test_others_with_plain_attention_work(tmp_path, model_type, settings):
    directory = make_other(tmp_path, model_type, **settings)
    token_ids = random_tokens(np.random.default_rng(9), 20).tolist()
    logits = chain_logits(loading.load(str(directory), device="cpu", kv_slots=64).forward, token_ids)
    expected = reference_logits(load_reference(directory), token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["figs", "cuda:99", "meta", "cpu:x", ""])
def test_a_device_that_is_not_there_is_named(llama, device):
    with pytest.raises(ConfigError, match=f"device is '{device}'; available to torch: .*cpu, or give auto"):
        TorchEngine(str(llama), device=device)


def test_weights_that_were_cut_are_a_config_error(tmp_path):
    """As a download that broke leaves them; and a directory without a model."""
    with pytest.raises(ConfigError, match="no causal language model"):
        TorchEngine(str(tmp_path), device="cpu")
    weights = make_checkpoint("llama", tmp_path) / "model.safetensors"
    data = weights.read_bytes()
    for left in (0, 8, 100, len(data) // 2):
        weights.write_bytes(data[:left])
        with pytest.raises(ConfigError, match=r"no causal language model that transformers can load: .*header"):
            TorchEngine(str(tmp_path), device="cpu")


SIZES = ("num_hidden_layers", "max_position_embeddings", "num_attention_heads", "vocab_size")
NO_MODEL = "no causal language model that transformers can load"
# Transformers takes random ones for tensors that are missing, and says so in a table.
MISSING = r"model\.layers\.3\.input_layernorm\.weight is missing \(9 are\)"


@each(
    ("name", "value", "said"),
    [
        *(("hidden_size", 41, NO_MODEL), ("head_dim", -1, NO_MODEL), ("hidden_act", "x", NO_MODEL)),
        ("num_hidden_layers", 4, MISSING),
        *(
            (name, size, rf"config\.json: {name} is {re.escape(repr(size))}, but must be an integer of at least 1")
            for name, size in product(SIZES, [0, -1, "x", 2.5])
        ),
    ],
)
def test_a_config_that_does_not_fit_is_a_config_error(llama, tmp_path, name, value, said):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ConfigError, match=said):
        TorchEngine(str(tmp_path), device="cpu")


def test_a_model_of_the_hub_is_fetched_with_its_chat_templates(monkeypatch, tmp_path):
    asked: list[str] = []
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, allow_patterns: asked.extend(allow_patterns) or tmp_path
    )
    assert resolve_checkpoint("someone/model") == tmp_path
    assert list(huggingface_hub.utils.filter_repo_objects(TOKENIZER_FILES, allow_patterns=asked)) == [*TOKENIZER_FILES]

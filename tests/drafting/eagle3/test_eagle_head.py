"""EAGLE-3 heads in SpecForge's layout: their outputs for any file format, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.form import EagleShape, default_layers, eagle_shape, is_eagle
from specq.drafting.eagle3.host import HostNetwork
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.head_files import input_matrix
from specq.drafting.speculators_form import target_of
from specq.protocol import ConfigError, ModelInfo
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import (
    PICKLED,
    WEIGHTS,
    as_speculators,
    change_head,
    eagle_logits,
    eagle_shape_of,
    make_eagle,
)
from specq.testing.checkpoints_gguf import write_gguf
from specq.testing.checkpoints_heads import make_published

HASH = "a" * 64
INFO = ModelInfo("target", "", "", "torch", VOCAB + 5, VOCAB, (), 600, HASH)
HIDDEN = 40
KNOWN = 17  # tokens of the small vocabulary
LAYERS = (0, 1, 2)
SHAPE = eagle_shape_of(HIDDEN, VOCAB, KNOWN, layers=LAYERS)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TOKENS = [5, 9, 33, 7, 61, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


def loaded(heads: Path, target: Path, info: ModelInfo = INFO):
    return load_eagle(str(heads), str(target), info, "cpu")


def said_by(head, taps: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """What a network says behind tokens that all have states of the target's before them, in one pass."""
    count = len(token_ids)
    mask = torch.ones(count, count, dtype=torch.bool).tril()

    def attend(queries, keys, values):
        moved = (part.transpose(1, 2) for part in (queries, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(*moved, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    network = head.network
    projected = network.project(taps)[None]
    rotations = network.rotations(torch.arange(count)[None], projected.dtype)
    states = network(projected, torch.tensor([token_ids]), rotations, attend)
    return network.logits(states)[0]


def taps(width: int = HIDDEN, count: int = len(TOKENS)) -> torch.Tensor:
    return torch.randn(count, 3 * width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("kept", [WEIGHTS, PICKLED])
def test_a_head_loads_as_it_is_published(tmp_path, target, kept, norm_before_residual):
    """With its own embedding and tables, in either file."""
    shape = replace(SHAPE, norm_before_residual=norm_before_residual)
    made = make_eagle(tmp_path / "head", shape)
    tensors = load_file(made / WEIGHTS)
    expected = eagle_logits(made, shape, taps(), TOKENS, tensors["embed_tokens.weight"])
    if kept == PICKLED:
        torch.save(tensors, made / PICKLED)
        (made / WEIGHTS).unlink()

    head = loaded(made, target)

    torch.testing.assert_close(said_by(head, taps(), TOKENS), expected, atol=1e-4, rtol=1e-4)
    assert head.token_ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert head.layers == LAYERS


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gguf"])
def test_a_head_without_an_embedding_reads_the_targets(tmp_path, kind):
    """Of a directory or a GGUF file; it speaks of all tokens, padding left out."""
    target = make_checkpoint("qwen2" if kind == "qwen2" else "llama", tmp_path / "target")
    if kind == "gguf":
        target = write_gguf(target, tmp_path / "target.gguf", linear=gguf.GGMLQuantizationType.F32)
    matrix = input_matrix(target).float()
    shape = eagle_shape_of(matrix.shape[1], VOCAB + 2, VOCAB + 2, layers=LAYERS)
    made = make_eagle(tmp_path / "head", shape, embedding=False)
    info = replace(INFO, vocab_size=10_000, num_tokens=VOCAB)

    head = loaded(made, target, info)
    given = taps(matrix.shape[1])
    expected = eagle_logits(made, shape, given, TOKENS, matrix)[:, :VOCAB]
    torch.testing.assert_close(said_by(head, given, TOKENS), expected, atol=1e-3, rtol=1e-3)
    assert head.token_ids is None


def test_layers_are_counted_as_each_layout_counts_them(tmp_path, target):
    """SpecForge names what stands behind a layer, vLLM at the top level what goes into it; without either the usual
    three."""
    made = make_eagle(tmp_path / "head", SHAPE)
    change_head(made, eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert loaded(made, target).layers == LAYERS
    assert default_layers(32) == (1, 15, 28)  # which vLLM calls 2, 16 and 29
    assert default_layers(7) == (1, 2, 3)
    change_head(made, eagle_aux_hidden_state_layer_ids=None)
    refused(made, target, "has 3 layers; an EAGLE-3 head whose config.json names no layers needs at least 7")


def refused(heads: Path, target: Path, match: str, info: ModelInfo = INFO) -> None:
    with pytest.raises(ConfigError, match=match):
        loaded(heads, target, info)


def made_of(tmp_path: Path, shape: EagleShape = SHAPE) -> Path:
    return make_eagle(tmp_path / "head", shape)


def test_a_head_of_another_target_is_refused(tmp_path, target):
    """Of another hidden size, vocabulary, tokenizer or depth."""
    refused(
        make_eagle(tmp_path / "a", eagle_shape_of(48, VOCAB, KNOWN, layers=LAYERS)),
        *(target, "hidden states of size 48; those of target have 40"),
    )
    for vocab in (VOCAB - 1, VOCAB + 6):
        made = make_eagle(tmp_path / str(vocab), eagle_shape_of(HIDDEN, vocab, KNOWN, layers=LAYERS))
        refused(made, target, f"a vocabulary of {vocab} tokens; target has {VOCAB}, in a matrix of {VOCAB + 5} rows")
    other = replace(SHAPE, num_tokens=VOCAB, tokenizer_hash="b" * 64)
    refused(make_eagle(tmp_path / "b", other), target, "trained for another tokenizer")
    deep = replace(SHAPE, layers=(0, 1, 3))
    refused(make_eagle(tmp_path / "c", deep), target, "behind layers 0, 1, 3; the target has only layers 0 to 2")
    own = replace(SHAPE, num_tokens=VOCAB, tokenizer_hash=HASH)
    assert loaded(make_eagle(tmp_path / "d", own), target).layers == LAYERS


@pytest.mark.parametrize("name", [WEIGHTS, PICKLED])
@pytest.mark.parametrize("left", [0, 3, 500, 20_000])
def test_a_file_that_was_cut_short_is_refused(tmp_path, target, name, left):
    made = made_of(tmp_path)
    if name == PICKLED:
        torch.save(load_file(made / WEIGHTS), made / PICKLED)
        (made / WEIGHTS).unlink()
    (made / name).write_bytes((made / name).read_bytes()[:left])
    refused(made, target, f"{name} cannot be read; it may be truncated")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"midlayer.self_attn.q_proj.weight": None}, r"midlayer.self_attn.q_proj.weight is missing \(1 tensors are\)"),
        ({"fc.weight": None, "norm.weight": None}, r"fc.weight is missing \(2 tensors are\)"),
        ({"d2t": None}, "d2t is missing"),
        ({"midlayer.x": torch.zeros(2)}, "it has midlayer.x, which EAGLE-3 heads have not"),
        ({"norm.weight": torch.zeros(41)}, r"norm.weight has the shape \(41,\), and should have \(40,\)"),
        ({"embed_tokens.weight": torch.zeros(7, 40)}, r"embed_tokens.weight has the shape \(7, 40\)"),
        ({"fc.weight": torch.zeros(40, 120, dtype=torch.int8)}, "fc.weight is int8, and should be float32"),
        ({"d2t": torch.zeros(KNOWN)}, "d2t is float32, and should be int64 or int32"),
        ({"norm.weight": torch.full((40,), torch.nan)}, "not finite, in norm.weight"),
        ({"d2t": torch.full((KNOWN,), -1)}, (f"d2t must contain ascending token ids within the vocabulary, 0 to "
            f"{VOCAB - 1}")),
        ({"d2t": torch.full((KNOWN,), VOCAB)}, "d2t must contain ascending token ids"),
        ({"d2t": -torch.arange(KNOWN)}, "d2t must contain ascending token ids"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "d2t and t2d contain different tokens"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path, target, tensors, match):
    made = made_of(tmp_path)
    change_head(made, tensors)
    refused(made, target, match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"hidden_size": None}, "hidden_size is None; an EAGLE-3 head needs a whole number"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "4 attention heads of size 8 cannot share 3 key-value heads"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; EAGLE-3 heads are computed with 1"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is 0.0, but must be a number above 0"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor must be below high_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("rope_scaling is 'yarn'; EAGLE-3 heads are "
            "computed with default, linear, llama3")),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, but must be a number above 0"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, r"is \[1, 2\], but must be 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}}, "must be 3 layers, ascending"),
        ({"tokenizer_hash": "x"}, "tokenizer_hash is 'x', but must be of 64 hex digits"),
        ({"intermediate_size": 47}, "midlayer.mlp.down_proj.weight has the shape"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(tmp_path, target, config, match):
    made = made_of(tmp_path)
    change_head(made, **config)
    refused(made, target, match)


def test_a_checkpoint_that_is_not_a_head_is_refused(tmp_path, target):
    refused(tmp_path / "nowhere", target, "the directory .*nowhere of an EAGLE-3 head does not exist")
    refused(target, target, "does not contain an EAGLE-3 head: its config.json has no draft_vocab_size")
    made = made_of(tmp_path)
    (made / WEIGHTS).unlink()
    refused(made, target, "has neither model.safetensors nor pytorch_model.bin")


def test_checkpoint_forms_are_distinguished(tmp_path):
    assert is_eagle(made_of(tmp_path))
    assert not is_eagle(make_published(tmp_path / "medusa", HIDDEN, VOCAB))
    assert not is_eagle(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"architectures": 3}')
    assert not is_eagle(tmp_path)


def test_the_shape_is_read_as_it_was_written(tmp_path):
    """Published heads leave some of it out."""
    own = replace(SHAPE, num_tokens=VOCAB, tokenizer_hash=HASH, rope_theta=500_000.0)
    assert eagle_shape(make_eagle(tmp_path / "a", own)) == own
    made = make_eagle(tmp_path / "b", replace(SHAPE, head_dim=10), target_hidden_size=None, head_dim=None)
    assert eagle_shape(made) == replace(SHAPE, head_dim=10)


def said_by_arrays(heads: Path, target: Path, taps: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """The same by the network in NumPy."""
    network, count = HostNetwork(load_arrays(str(heads), str(target), INFO)), len(token_ids)

    def attend(*rows):
        moved = (torch.from_numpy(part).transpose(0, 1)[None] for part in rows)
        found = torch.nn.functional.scaled_dot_product_attention(*moved, is_causal=True, enable_gqa=True)
        return found[0].transpose(0, 1).numpy()

    states = network(network.project(taps.numpy()), np.array(token_ids), np.arange(count), attend)
    return torch.from_numpy(network.logits(states))


@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_form_of_speculators_says_the_same(tmp_path, target, norm_before_residual, embedding, has_head_norms):
    shape = replace(SHAPE, norm_before_residual=norm_before_residual, has_head_norms=has_head_norms)
    ours = make_eagle(tmp_path / "ours", shape, embedding=embedding)
    theirs = as_speculators(make_eagle(tmp_path / "theirs", shape, embedding=embedding), "org/target")
    assert is_eagle(theirs)
    assert (target_of(theirs), target_of(ours)) == ("org/target", "")
    found, expected = (loaded(heads, target) for heads in (theirs, ours))
    assert found.layers == expected.layers
    logits = said_by(found, taps(), TOKENS)
    assert torch.equal(logits, said_by(expected, taps(), TOKENS))
    by_hand = eagle_logits(ours, shape, taps(), TOKENS, expected.network.get_buffer("embedding"))
    torch.testing.assert_close(logits, by_hand, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(said_by_arrays(theirs, target, taps(), TOKENS), by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_speculators_may_leave_out_defaults(tmp_path, kind):
    made = as_speculators(make_eagle(tmp_path / "a", SHAPE), "org/target")
    said = json.loads((made / "config.json").read_text())
    said["transformer_layer_config"] = {"model_type": kind.model_type, "num_hidden_layers": 1}
    for key in ("norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        del said[key]
    (made / "config.json").write_text(json.dumps(said))
    expected = kind()
    found = eagle_shape(made)
    assert (found.hidden_size, found.intermediate_size) == (expected.hidden_size, expected.intermediate_size)
    assert (found.num_attention_heads, found.head_dim) == (expected.num_attention_heads, expected.head_dim)
    assert (found.vocab_size, found.rms_norm_eps) == (expected.vocab_size, expected.rms_norm_eps)
    assert (found.num_key_value_heads, found.target_hidden_size) == (expected.num_key_value_heads, expected.hidden_size)
    assert found.norm_before_residual  # as vLLM reads it
    assert found.layers == ()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"speculators_model_type": "dflash"},
            "is 'dflash'; of the library speculators specq reads .*, and EAGLE-3 heads must be 'eagle3'",
        ),
        (
            {"speculators_model_type": "dspark"},
            r"is 'dspark' \(DSpark\); of the library speculators specq reads 'eagle3', 'peagle' and 'dflash'",
        ),
        ({"transformer_layer_config": None}, "of the type NoneType, but must be an object with the sizes"),
        ({"layer": {"rope_parameters": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor is 0.5; EAGLE-3 heads"),
        ({"layer": {"model_type": "gemma3"}}, "model_type is 'gemma3'; EAGLE-3 heads are computed with llama or qwen3"),
        ({"layer": {"model_type": "qwen3"}}, "self_attn.k_norm.weight is missing|self_attn.q_norm.weight is missing"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "layer_types is .'sliding_attention'."),
        ({"layer": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
        ({"norm_output": True}, "norm_output is True; EAGLE-3 heads are computed without"),
        ({"fc_norm": True}, "fc_norm is True"),
        ({"norm_before_fc": True}, "norm_before_fc is True"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "must be 3 layers"),
    ],
)
def test_another_form_of_speculators_is_refused(tmp_path, target, config, match):
    refused(as_speculators(made_of(tmp_path), "org/target", **config), target, match)


def test_rotations_are_scaled_as_in_llama(tmp_path, target):
    """By transformers' own frequencies; both networks use them."""
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, rope_theta=10_000.0, rope_scaling=dict(LLAMA3))
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    made = make_eagle(tmp_path / "head", replace(SHAPE, rope_scaling=tuple(LLAMA3.items())))
    assert eagle_shape(made).rope_scaling == tuple(LLAMA3.items())
    frequencies = [loaded(made, target).network.rotations._frequencies]
    frequencies.append(torch.from_numpy(HostNetwork(load_arrays(str(made), str(target), INFO))._frequencies))
    for found in frequencies:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    plain, _ = ROPE_INIT_FUNCTIONS["linear"](
        LlamaConfig(hidden_size=32, num_attention_heads=4, rope_scaling={"rope_type": "linear", "factor": 1.0}),
        torch.device("cpu"),
    )
    assert not torch.allclose(plain, expected)

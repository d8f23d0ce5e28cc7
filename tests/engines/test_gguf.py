"""GGUF files in the torch engine: the same bits as the checkpoint that holds the same values, and clear refusals."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from specq.checkpoints import read_gguf
from specq.engines.checkpoint import resolve_directory, tensors_hash
from specq.engines.native import HostForward
from specq.engines.native.gguf import values_format
from specq.engines.native.weights import BF16, BLOCK_TYPES, F32
from specq.engines.torch import load as load_model
from specq.engines.torch import loading
from specq.models import resolve_model
from specq.protocol import ConfigError, fits, mismatch
from specq.testing import tokenizer_json
from specq.testing.checkpoints import chain_logits, load_reference, random_tokens, reference_logits, save_random
from specq.testing.checkpoints_gguf import MADE, Q, keep_values, sentencepiece_keys, write_gguf
from specq.text import TextCodec, load_tokenizer_files
from tests.each import each

KINDS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, untied": {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 1},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
}
TYPES = (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)


def make_source(directory: Path, linear=Q.Q8_0, **settings) -> Path:
    """Save a random checkpoint, whose values a GGUF file of this type can hold."""
    save_random(directory, {"model_type": "llama", **MADE, **settings})
    keep_values(directory, linear)
    return directory


def load(model: Path | str, **options):
    return load_model(str(model), device="cpu", kv_slots=64, **options)


def logits_of(model: Path, token_ids: list[int], **options) -> torch.Tensor:
    return chain_logits(load(model, **options).forward, token_ids)


def formats(forward: HostForward) -> set[int]:
    """Return the formats of all the matrices that the kernels read."""
    layers = (getattr(layer, name) for layer in forward.native._layers for name in ("qkv", "out", "gate_up", "down"))
    return {matrix.format for matrix in (forward.native._model.head, *layers)}


@pytest.fixture(scope="module")
def token_ids():
    return random_tokens(np.random.default_rng(3), 40).tolist()


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_file_says_what_the_checkpoint_of_its_values_says(settings, tmp_path, token_ids):
    source = make_source(tmp_path / "source", **settings)
    path = write_gguf(source, tmp_path / "model.gguf")

    ours = logits_of(path, token_ids, dtype="float32")

    assert torch.equal(ours, logits_of(source, token_ids, dtype="float32"))
    torch.testing.assert_close(ours, reference_logits(load_reference(source), token_ids), atol=1e-3, rtol=1e-3)


def test_a_model_in_parts_says_what_it_says_in_one(tmp_path, token_ids):
    """Its name is that of the whole; its fingerprint is its own, since that covers files and not what is in them."""
    source = make_source(tmp_path / "source")
    whole = load(write_gguf(source, tmp_path / "mine.gguf"))
    (tmp_path / "parts").mkdir()
    write_gguf(source, tmp_path / "parts" / "mine.gguf", tensors_each=7)
    parts = load(tmp_path / "parts")
    assert torch.equal(chain_logits(parts.forward, token_ids), chain_logits(whole.forward, token_ids))
    assert (parts.info.name, parts.info.eos_ids) == (whole.info.name, whole.info.eos_ids) == ("mine", (2, 0))
    assert parts.info.fingerprint != whole.info.fingerprint


@each("linear", TYPES)
def test_each_type_is_dequantised(linear, tmp_path, token_ids):
    source = make_source(tmp_path / "source", linear)
    path = write_gguf(source, tmp_path / "model.gguf", linear=linear)
    assert torch.equal(logits_of(path, token_ids, dtype="float32"), logits_of(source, token_ids, dtype="float32"))


@pytest.mark.parametrize("linear", [Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_blocks_of_the_file_give_the_bits_of_its_values(settings, linear, tmp_path, token_ids):
    """The kernels read every matrix in its blocks: heads tied and untied, and Llama's rows in transformers' order."""
    source = make_source(tmp_path / "source", linear, **settings)
    path = write_gguf(source, tmp_path / "model.gguf", linear=linear)
    network = loading.load_network(path, torch.device("cpu"))

    floats = loading.assemble(network, path, kv_slots=64).forward
    blocks = load(path).forward

    assert (formats(floats), formats(blocks)) == ({F32}, {BLOCK_TYPES[linear.name][0]})
    for length in (1, 5, 8, 40):
        assert torch.equal(chain_logits(blocks, token_ids[:length]), chain_logits(floats, token_ids[:length]))


def test_other_types_and_rounded_values_are_read_as_numbers(tmp_path):
    source = make_source(tmp_path / "source", Q.Q5_1)
    path = write_gguf(source, tmp_path / "model.gguf", linear=Q.Q5_1)
    assert formats(load(path, dtype="float32").forward) == {F32}
    assert formats(load(path).forward) == {BF16}
    blocks = write_gguf(source, tmp_path / "blocks.gguf")
    assert not isinstance(load(blocks, dtype="bfloat16").forward, HostForward)


def test_packed_weights_are_in_memory_once(source, monkeypatch):
    layers, load_network = [], loading.load_network

    def watched(*arguments):
        network = load_network(*arguments)
        layers.extend(weakref.ref(module) for module in network.modules() if isinstance(module, torch.nn.Linear))
        return network

    monkeypatch.setattr(loading, "load_network", watched)
    _loaded = load(source)
    assert len(layers) == 8
    assert not any(layer() for layer in layers)


def test_on_a_cpu_values_are_kept_exactly_by_default(tmp_path, token_ids):
    """Exact and rounded values are two models, by their fingerprints; the default is the exact one."""
    path = write_gguf(make_source(tmp_path / "source"), tmp_path / "model.gguf")

    infos = [load(path, dtype=dtype).info for dtype in ("auto", "float32", "bfloat16")]

    assert torch.equal(logits_of(path, token_ids), logits_of(path, token_ids, dtype="float32"))
    assert [info.dtype for info in infos] == ["float32", "float32", "bfloat16"]
    assert infos[0].fingerprint == infos[1].fingerprint != infos[2].fingerprint


def test_elsewhere_values_are_kept_in_bfloat16_by_default(tmp_path):
    """On other devices, and where the kernels do not know a file's blocks: expanded to float32, it would take twice the
    bytes."""
    source = make_source(tmp_path / "source")
    known = write_gguf(source, tmp_path / "known.gguf")
    other = write_gguf(source, tmp_path / "other.gguf", linear=Q.Q5_1)
    defaults = {on_host: values_format(known, "auto", on_host=on_host) for on_host in (True, False)}
    assert defaults == {True: "float32", False: "bfloat16"}
    assert values_format(other, "auto", on_host=True) == "bfloat16"
    assert values_format(known, "float16", on_host=True) == "float16"


def test_the_rope_of_llama_3_is_taken_from_its_factors(tmp_path, token_ids):
    """The converter writes no scaling, but what to divide each frequency by."""
    scaled = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    source = make_source(tmp_path / "source", rope_parameters=scaled)
    plain = 5000.0 ** (-torch.arange(0, 32, 2) / 32)
    factors = (plain / load_reference(source).model.rotary_emb.inv_freq).numpy()
    path = write_gguf(source, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})

    ours = logits_of(path, token_ids, dtype="float32")

    torch.testing.assert_close(ours, logits_of(source, token_ids), atol=1e-4, rtol=1e-4)
    without = write_gguf(source, tmp_path / "without.gguf")
    assert (ours - logits_of(without, token_ids, dtype="float32")).abs().max() > 0.1


@each("kind", ["linear", "yarn", None])
def test_rope_scaling_is_read(kind, tmp_path, token_ids):
    """A factor alone is linear, as in llama.cpp."""
    scaled = {"rope_type": kind or "linear", "rope_theta": 5000.0, "factor": 4.0}
    said = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, "llama.attention.causal": True}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = said["llama.rope.scaling.original_context_length"] = 150
    source = make_source(tmp_path / "source", rope_parameters=scaled)
    path = write_gguf(source, tmp_path / "model.gguf", metadata=said)
    assert torch.equal(logits_of(path, token_ids, dtype="float32"), logits_of(source, token_ids))


def test_info_describes_the_file(tmp_path):
    source = make_source(tmp_path / "source")
    path = write_gguf(source, tmp_path / "mine.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    info = load(path).info
    assert (info.name, info.vocab_size, info.max_length, info.eos_ids) == ("mine", 352, 600, (2, 0))
    assert info.num_tokens < 352, "padding of the vocabulary is no token"
    assert (info.former_fingerprint, info.added_eos_ids) == (tensors_hash(path), ())
    other = write_gguf(source, tmp_path / "other.gguf", linear=Q.Q5_1, metadata={"tokenizer.ggml.eot_token_id": 0})
    assert load(other).info.fingerprint != info.fingerprint


def test_a_file_with_sentencepieces_tokenizer_is_served(source, tmp_path, token_ids):
    """Weights as ever; its texts, ends and tokens are those of its vocabulary."""
    path = write_gguf(source, tmp_path / "llama2.gguf", metadata=sentencepiece_keys(352))
    info = load(path).info
    assert (info.eos_ids, info.num_tokens < info.vocab_size == 352) == ((2,), True)
    assert torch.equal(logits_of(path, token_ids), logits_of(write_gguf(source, tmp_path / "other.gguf"), token_ids))
    codec = TextCodec(load_tokenizer_files(path))
    assert codec.encode_chat([{"role": "user", "content": "a <user>"}])[-2:] == codec.encode_part("assistant\n")[-2:]
    assert codec.decode(codec.encode("a \U0001f642")) == "a \U0001f642"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_source(tmp_path_factory.mktemp("source"), num_hidden_layers=1)


REFUSED = {
    "architecture": (
        {"general.architecture": "gemma2"},
        r"architecture is 'gemma2'; supported in GGUF files: llama \(.*, qwen2 .*--engine vllm the model's directory",
    ),
    "a key": ({"llama.attention.sliding_window": 512}, r"llama model with attention\.sliding_window = 512"),
    "experts": ({"llama.expert_count": 8}, r"expert_count = 8"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, r"scaling\.type 'longrope' \(supported: none, linear"),
    "a missing key": ({"llama.block_count": None}, r"lacks the key llama\.block_count"),
    "layers that differ": (
        {"llama.attention.head_count_kv": [1, 2]},
        r"head_count_kv that differs from layer to layer",
    ),
    "too many layers": ({"llama.block_count": 2}, r"not fit its own metadata: 2 layers .* tensors are of 1 layers"),
    "absurdly many layers": ({"llama.block_count": 2**31 - 1}, r"does not fit its own metadata: 2147483647 layers"),
    "more than a size can be": ({"llama.context_length": 2**31}, r"context_length is 2147483648, but must be a whole"),
    "half a layer": ({"llama.block_count": 0.5}, r"block_count is 0\.5, but must be a whole number"),
    "heads that do not divide": (
        {"llama.attention.head_count": 3, "llama.attention.key_length": None},
        r"does not fit its own metadata: 1 layers of 3 heads, 2 of keys.*blk\.0\.attn_q\.weight of 128 rows",
    ),
    "no heads of keys": ({"llama.attention.head_count_kv": 0}, r"head_count_kv, or its value is not above 0"),
    "more heads than there are": ({"llama.attention.head_count_kv": 4}, r"4 of keys.*attn_k\.weight of 64 rows"),
    "a width of no model": (
        {"llama.embedding_length": 66},
        r"(?s)describes a model that transformers cannot create.*66",
    ),
    "no number": ({"llama.rope.freq_base": float("nan")}, r"freq_base, or its value is not above 0"),
    "a text for a number": ({"llama.rope.freq_base": "x"}, r"freq_base, or its value is not above 0"),
    "a list for a name": ({"tokenizer.ggml.pre": ["gpt-2"]}, r"\.pre is \['gpt-2'\]"),
    "other sizes": ({"llama.feed_forward_length": 128}, r"down_proj\.weight has the shape \(64, 96\), and should have"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, r"model\.gguf: tokenizer\.ggml\.model is 'bert'; supported in"),
    "an adapter": ({"general.type": "adapter"}, r"general\.type is 'adapter'; supported in GGUF files: model"),
    "no causal mask": ({"llama.attention.causal": False}, r"llama model with attention\.causal = False"),
    "a yarn of its own": ({"llama.rope.scaling.yarn_ext_factor": 0.0}, r"with rope\.scaling\.yarn_ext_factor = 0"),
    "pooling": ({"llama.pooling_type": 3}, r"pooling_type = 3"),
    "a scale": ({"llama.logit_scale": 0.5}, r"logit_scale = 0\.5"),
    "a part that is rotated": ({"llama.rope.dimension_count": 16}, r"keys, values and rotated parts differ in size"),
    "more tokens than rows": (
        {"tokenizer.ggml.tokens": ["a"] * 353, "tokenizer.ggml.token_type": [1] * 353},
        r"does not fit its own metadata: 353 tokens .* token_embd\.weight of 352 rows",
    ),
}


@pytest.mark.parametrize(("metadata", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_named(metadata, said, source, tmp_path):
    path = write_gguf(source, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ConfigError, match=said):
        load(path)


def test_a_tensor_that_llama_has_not_is_named_and_a_type_that_cannot_be_dequantised(source, tmp_path):
    """Q8_1 is known to the format, but no file's weights have it."""
    path = write_gguf(source, tmp_path / "other.gguf", extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.attn_sinks\.weight, which a llama model"):
        load(path)
    path = write_gguf(source, tmp_path / "model.gguf")
    data = path.read_bytes() + bytes(4096)  # other types take more
    name = b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 16  # after the number of dimensions and two of them
    for number, said in ((Q.Q8_1, "Q8_1; supported: F32, F16, Q4_0"), (99, "99, which specq does not support")):
        path.write_bytes(data[:at] + bytes([number]) + data[at + 1 :])
        with pytest.raises(ConfigError, match=rf"blk\.0\.attn_v\.weight has the type {said}"):
            load(path)


@each("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(scale, source, tmp_path):
    path = write_gguf(source, tmp_path / "model.gguf")
    row = read_gguf(path).tensors["blk.0.ffn_up.weight"].data[0].tobytes()
    path.write_bytes(path.read_bytes().replace(row, np.float16(scale).tobytes() + row[2:]))
    with pytest.raises(ConfigError, match=r"model\.gguf is damaged: the tensor blk\.0\.ffn_up\.weight has values that"):
        load(path)


def test_vllm_takes_directories():
    with pytest.raises(ConfigError, match=r"a\.gguf is a GGUF file, which the vllm engine does not support"):
        resolve_directory("a.gguf", "the vllm engine")


def test_quantised_values_are_those_of_the_package():
    """What the comparisons above rest on: a type's values stay what they are when they are quantised again."""
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    for kind in TYPES:
        once = dequantize(quantize(values, kind), kind)
        assert np.array_equal(once, dequantize(quantize(once, kind), kind)), kind.name


def test_drafts_fit_a_file_by_its_tokenizer(source, tmp_path):
    """A checkpoint with the same tokenizer fits, one with another is refused with both sizes."""
    target = load(write_gguf(source, tmp_path / "target.gguf")).info
    same = shutil.copytree(source, tmp_path / "same")
    (same / "tokenizer.json").write_text(tokenizer_json())
    other = load(resolve_model("tiny", "draft")).info
    assert fits(load(same).info, target)
    assert not fits(other, target)
    assert f"({other.num_tokens} tokens" in mismatch(other, [target])
    assert f"target ({target.num_tokens} tokens" in mismatch(other, [target])

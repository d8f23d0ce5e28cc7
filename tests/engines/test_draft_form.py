"""Draft models of our own form in the torch engine: what they say, what is said of them, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specq.checkpoints.draft_form import (
    HEAD,
    MASKS,
    MOST_PLACES,
    SCALE,
    TOKEN_IDS,
    WEIGHTS,
    draft_shape,
    is_shared,
    to_int8,
)
from specq.engines.native.draft_weights import read_draft
from specq.engines.native.weights import BLOCK_TYPES
from specq.engines.torch import load as load_model
from specq.engines.torch.engine import TorchEngine
from specq.models import draft_for, parallel_for, resolve_model
from specq.protocol import ConfigError
from specq.testing.checkpoints import chain_logits
from specq.testing.checkpoints_draft import (
    MADE,
    PARALLEL,
    VOCAB,
    change_draft,
    draft_logits,
    head_tokens,
    make_draft,
    places_logits,
)
from tests.each import each

EIGHT_BITS = BLOCK_TYPES["Q8_0"][0]


@pytest.fixture
def directory(tmp_path):
    return make_draft(tmp_path / "draft")


def load(directory, **options):
    return load_model(str(directory), device="cpu", kv_slots=64, **options)


def logits_of(loaded, token_ids: list[int]) -> torch.Tensor:
    return chain_logits(loaded.forward, token_ids)


@pytest.mark.parametrize("eager", [False, True], ids=["native", "torch"])
def test_logits_are_those_of_plain_arithmetic(directory, eager):
    context = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    loaded = load(directory, eager=eager)

    ours, plain = logits_of(loaded, context), draft_logits(directory, context)

    assert loaded.info.arithmetic == ("torch cpu" if eager else "native cpu")
    assert loaded.token_ids.tolist() == head_tokens(directory)
    assert ours.shape == (MADE.head_size,)
    torch.testing.assert_close(ours, plain[loaded.token_ids], atol=1e-3, rtol=1e-3)


def test_rows_of_whole_blocks_are_read_in_eight_bits(tmp_path):
    path = make_draft(tmp_path, replace(MADE, hidden_size=64, intermediate_size=96))
    context = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    loaded = load(path)
    native = loaded.forward.native
    layer = native._layers[0]
    assert {one.format for one in (native._model.head, layer.qkv, layer.gate_up, layer.down)} == {EIGHT_BITS}
    plain = draft_logits(path, context)
    torch.testing.assert_close(logits_of(loaded, context), plain[loaded.token_ids], atol=1e-3, rtol=1e-3)


def test_info_speaks_of_the_targets_tokens(directory):
    """The fit is checked by the tokenizer that config.json names; there is none in the directory."""
    info = load(directory).info
    assert (info.vocab_size, info.num_tokens, info.tokenizer_hash) == (VOCAB + 5, VOCAB, "a" * 64)
    assert (info.max_length, info.dtype) == (600, "float32")
    assert load(directory).num_masks == 0


def test_the_fingerprint_depends_on_the_weights(directory, tmp_path):
    other = make_draft(tmp_path / "b", seed=1)
    assert load(directory).info.fingerprint != load(other).info.fingerprint


def test_eight_bits_are_within_half_a_step_of_the_values():
    values = np.random.default_rng(0).normal(0, 1, (5, 33)).astype(np.float32)
    values[2] = 0
    rounded, scales = to_int8(values)
    assert np.abs(rounded).max(1).tolist() == [127, 127, 0, 127, 127]
    assert np.all(np.abs(rounded * scales[:, None] - values) <= scales[:, None] * 0.501)


def refused(directory, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(directory)


@each("shape", [MADE, PARALLEL])
def test_it_cannot_be_a_target_and_truncated_or_missing_files_are_refused(tmp_path, shape):
    directory = make_draft(tmp_path / "draft", shape)
    with pytest.raises(ConfigError, match="cannot be a target"):
        TorchEngine(str(directory), device="cpu")
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    refused(directory, "may be truncated")
    path.unlink()
    refused(directory, f"has no {WEIGHTS}")


@each("ids", [[-1, 5], [5, VOCAB], [5, 5], [9, 5]])
def test_head_tokens_must_ascend_within_the_vocabulary(tmp_path, ids):
    directory = make_draft(tmp_path, replace(MADE, head_size=2))
    change_draft(directory, {TOKEN_IDS: torch.tensor(ids, dtype=torch.int32)})
    refused(directory, f"must ascend within the vocabulary, 0 to {VOCAB - 1}")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({HEAD: None}, r"lm_head\.weight is missing"),
        ({HEAD: torch.zeros(36, 48, dtype=torch.int8)}, r"lm_head\.weight is \('int8', \(36, 48\)\)"),
        ({HEAD: torch.zeros(37, 48)}, r"lm_head\.weight is \('float32'"),
        ({"model.layers.2.norm": torch.zeros(3)}, r"should be left out"),
        ({HEAD + SCALE: torch.full((37,), torch.nan)}, "values that are not finite, in lm_head"),
    ],
    ids=["missing", "shape", "format", "superfluous", "nan"],
)
def test_weights_that_do_not_fit_are_refused(directory, tensors, match):
    change_draft(directory, tensors)
    refused(directory, match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"head_dim": None}, "head_dim is None"),
        ({"rope_theta": "wide"}, "rope_theta is 'wide'"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers is 2\.5"),
        ({"tokenizer_hash": "short"}, "needs 64 hex digits"),
        ({"num_tokens": VOCAB + 6}, "must not decrease"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(directory, config, match):
    change_draft(directory, **config)
    refused(directory, match)


# --- parallel draft models ----------------------------------------------------------------------------------------


@pytest.fixture
def parallel(tmp_path):
    return make_draft(tmp_path / "parallel", PARALLEL)


@pytest.mark.parametrize("eager", [False, True], ids=["native", "torch"])
def test_masks_are_tokens_behind_the_vocabulary(parallel, eager):
    """In a row of their own each says what plain arithmetic says of its place; the model's vocabulary is that without
    them."""
    loaded = load(parallel, eager=eager)
    assert (loaded.info.vocab_size, loaded.num_masks) == (VOCAB + 5, PARALLEL.num_places - 1)
    context = np.random.default_rng(3).integers(0, VOCAB, 20).tolist()
    expected = places_logits(parallel, context, PARALLEL.num_places)[:, loaded.token_ids]
    for place, of_place in enumerate(expected):
        masks = range(loaded.info.vocab_size, loaded.info.vocab_size + place)
        torch.testing.assert_close(logits_of(loaded, [*context, *masks]), of_place, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (0, "num_places is 0; a specq-draft model needs an integer above 0"),
        (-1, "num_places is -1"),
        (2.5, r"num_places is 2\.5"),
        ("four", "num_places is 'four'"),
        (MOST_PLACES + 1, f"num_places is {MOST_PLACES + 1}; at most {MOST_PLACES} are known"),
        (1, rf"{MASKS} is .*, and should be left out"),
        (None, rf"{MASKS} is .*, and should be left out"),
        (6, rf"{MASKS} is \('float32', \(3, 48\)\), and should be \('float32', \(5, 48\)\)"),
    ],
)
def test_a_number_of_places_that_does_not_fit_is_refused(parallel, places, match):
    change_draft(parallel, num_places=places)
    refused(parallel, match)


@pytest.mark.parametrize(
    ("masks", "match"),
    [
        (None, rf"{MASKS} is missing"),
        (torch.zeros(3, 47), rf"{MASKS} is \('float32', \(3, 47\)\)"),
        (torch.full((3, 48), torch.inf), f"values that are not finite, in {MASKS}"),
    ],
    ids=["missing", "shape", "infinite"],
)
def test_masks_that_do_not_fit_are_refused(parallel, masks, match):
    change_draft(parallel, {MASKS: masks})
    refused(parallel, match)


def test_the_bundled_one_is_the_draft_model_of_smollm2():
    """It names a tokenizer and knows a third of the tokens; its weights are whole."""
    loaded = load(resolve_model("smollm2", "draft"))
    assert draft_for("smollm2") == "smollm2"
    assert (loaded.info.num_tokens, len(loaded.token_ids), loaded.info.arithmetic) == (49152, 16384, "native cpu")
    assert logits_of(loaded, [1, 9690, 198]).isfinite().all()


def test_the_bundled_parallel_one_foresees_five_tokens_with_the_embedding_of_the_draft_model():
    """It is for the same tokenizer, and its own file holds nothing that the other has."""
    parallel, draft = (Path(resolve_model(name, "draft")) for name in (parallel_for("smollm2"), "smollm2"))
    own, theirs = (load_file(model / WEIGHTS) for model in (parallel, draft))
    read = read_draft(parallel, draft_shape(parallel))
    shared = {name for name in theirs if is_shared(name)}
    assert read.keys() - own.keys() == shared
    assert all(np.array_equal(read[name], theirs[name]) for name in shared)

    loaded = load(parallel)
    assert (loaded.num_masks, loaded.info.vocab_size) == (4, 49152)
    assert loaded.info.tokenizer_hash == draft_shape(draft).tokenizer_hash
    assert logits_of(loaded, [1, 9690, 198, *range(49152, 49156)]).isfinite().all()

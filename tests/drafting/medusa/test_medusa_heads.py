"""Medusa heads beside the torch engine: what they say, in both forms, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch

from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.head_files import output_matrix
from specq.drafting.medusa.form import MODEL_TYPE
from specq.drafting.medusa.network import load_heads
from specq.engines.checkpoint import describe
from specq.models import PREFERRED, default_model, resolve_model
from specq.protocol import ConfigError, ModelInfo
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_gguf import write_gguf
from specq.testing.checkpoints_heads import (
    PICKLED,
    PUBLISHED,
    change_heads,
    heads_logits,
    make_heads,
    make_published,
)

HASH = "a" * 64
INFO = ModelInfo("target", "", "", "torch", VOCAB + 5, VOCAB, (), 600, HASH)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


def states(width: int = 40) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(3))


def loaded(heads: Path, target: Path, info: ModelInfo = INFO):
    return load_heads(str(heads), str(target), info, "cpu")


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kept", [PUBLISHED, PICKLED])
def test_published_heads_load_as_they_are(tmp_path, target, kept, layers):
    """Either file. Each head has a matrix of its own, whose rows may be padded."""
    made = make_published(tmp_path / "heads", 40, VOCAB + 2, layers=layers)
    expected = heads_logits(made, states())
    (made / (PICKLED if kept == PUBLISHED else PUBLISHED)).unlink()

    heads = loaded(made, target)

    assert (heads.num_heads, heads.token_ids) == (3, None)
    torch.testing.assert_close(heads.logits(states()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head_size", [0, 17])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gguf"])
def test_heads_without_matrices_end_in_the_targets(tmp_path, kind, head_size):
    """Tied to the embedding or not, in a directory or a GGUF file; of the tokens that they know."""
    target = make_checkpoint("qwen2" if kind == "qwen2" else "llama", tmp_path / "target")
    if kind == "gguf":
        target = write_gguf(target, tmp_path / "target.gguf", linear=gguf.GGMLQuantizationType.F32)
    info = replace(INFO, vocab_size=10_000, num_tokens=VOCAB)
    matrix = output_matrix(target)
    made = make_heads(tmp_path / "heads", matrix.shape[1], tokenizer=(VOCAB, HASH), head_size=head_size)

    heads = loaded(made, target, info)

    given = states(matrix.shape[1])
    torch.testing.assert_close(heads.logits(given), heads_logits(made, given, matrix.float()), atol=1e-3, rtol=1e-3)
    assert (heads.token_ids is None) == (not head_size)


def test_the_output_matrix_is_that_of_the_network(tmp_path):
    """Also where the checkpoint is in parts."""
    from transformers import AutoModelForCausalLM

    target = make_checkpoint("qwen2", tmp_path / "target")
    network = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(output_matrix(target).float(), network.lm_head.weight.float())
    network.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").is_file()
    torch.testing.assert_close(output_matrix(tmp_path / "parts").float(), network.lm_head.weight.float())


def refused(heads: Path, target: Path, match: str, info: ModelInfo = INFO) -> None:
    with pytest.raises(ConfigError, match=match):
        loaded(heads, target, info)


def test_heads_of_another_hidden_size_are_refused(tmp_path, target):
    refused(make_published(tmp_path / "a", 48, VOCAB), target, "hidden states of size 48; those of target have 40")
    made = make_heads(tmp_path / "b", 48, tokenizer=(VOCAB, HASH))
    refused(made, target, "hidden states of size 48; those of target have 40")


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 6])
def test_heads_of_another_vocabulary_are_refused(tmp_path, target, vocab):
    made = make_published(tmp_path / "heads", 40, vocab)
    refused(made, target, f"output {vocab} tokens; target has {VOCAB}, in a matrix of {VOCAB + 5} rows")


@pytest.mark.parametrize("tokenizer", [(VOCAB, "b" * 64), (VOCAB - 1, HASH)])
def test_heads_of_another_tokenizer_are_refused(tmp_path, target, tokenizer):
    refused(make_heads(tmp_path / "heads", 40, tokenizer=tokenizer), target, "trained for another tokenizer")


def test_heads_that_were_trained_with_a_target_are_refused_for_others(tmp_path, target):
    """Where it is known which target it is; other heads name none."""
    made = make_heads(tmp_path / "heads", 40, tokenizer=(VOCAB, HASH))
    another = replace(INFO, fingerprint="c" * 64)
    assert loaded(made, target, another).num_heads == 4
    change_heads(made, target_fingerprint="d" * 64)
    refused(
        made, target, r"together with another target \(fingerprint dddddddddddd..\) than target \(cccccccccccc", another
    )
    assert loaded(made, target, replace(INFO, fingerprint="d" * 64)).num_heads == 4


@pytest.mark.parametrize("ids", [[3, 3], [-1, 3], [3, VOCAB], [4, 3], []])
def test_token_ids_that_make_no_sense_are_refused(tmp_path, target, ids):
    made = make_heads(tmp_path / "heads", 40, tokenizer=(VOCAB, HASH), head_size=2)
    change_heads(made, {TOKEN_IDS: torch.tensor(ids, dtype=torch.int32)})
    refused(made, target, "must ascend within the vocabulary, 0 to 98")


@pytest.mark.parametrize("name", [PUBLISHED, PICKLED])
@pytest.mark.parametrize("left", [0, 3, 500, 20_000])
def test_a_file_that_was_cut_short_is_refused(tmp_path, target, name, left):
    made = make_published(tmp_path / "heads", 40, VOCAB)
    (made / (PICKLED if name == PUBLISHED else PUBLISHED)).unlink()
    (made / name).write_bytes((made / name).read_bytes()[:left])
    refused(made, target, f"{name} cannot be read; it may be truncated")


class Payload:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return print, ("ran",)


def test_a_pickle_that_is_damaged_anywhere_is_refused_or_whole(tmp_path, target):
    """Any error of the unpickler becomes a refusal."""
    made, random, num_refused = make_published(tmp_path / "heads", 40, VOCAB, heads=1), Random(1), 0
    (made / PUBLISHED).unlink()
    whole = (made / PICKLED).read_bytes()
    for _ in range(150):
        at = random.randrange(900)
        (made / PICKLED).write_bytes(whole[:at] + bytes([random.randrange(256)]) + whole[at + 1 :])
        try:
            loaded(made, target)
        except ConfigError:
            num_refused += 1
    assert num_refused > 30


def test_a_pickle_may_hold_tensors_only(tmp_path, target, capsys):
    """A pickle from elsewhere runs no code."""
    made = make_published(tmp_path / "heads", 40, VOCAB)
    (made / PUBLISHED).unlink()
    torch.save({"0.0.linear.weight": Payload()}, made / PICKLED)
    refused(made, target, "cannot be read")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"1.0.linear.weight": None}, r"1.0.linear.weight is missing \(1 tensors are\)"),
        ({"0.0.linear.weight": None}, "0.0.linear.weight is missing|it has no 0.0.linear.weight"),
        ({"2.1.weight": None}, "2.1.weight is missing"),
        ({"3.1.weight": torch.zeros(VOCAB, 40)}, "it has 3.1.weight, which 3 heads of 1 blocks have not"),
        ({"1.0.linear.bias": torch.zeros(41)}, r"1.0.linear.bias has the shape \(41,\), and should have \(40,\)"),
        ({"2.1.weight": torch.zeros(7, 40)}, r"2.1.weight has the shape \(7, 40\)"),
        ({"1.0.linear.weight": torch.zeros(40, 40, dtype=torch.int8)}, "1.0.linear.weight.scale is missing"),
        ({"1.0.linear.bias": torch.zeros(40, dtype=torch.int64)}, "1.0.linear.bias is int64"),
        ({"1.0.linear.bias": torch.full((40,), torch.nan)}, "not finite, in 1.0.linear.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, target, tensors, match):
    made = make_published(tmp_path / "heads", 40, VOCAB)
    change_heads(made, tensors)
    refused(made, target, match)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"medusa_num_heads": 4}, "3.0.linear.weight is missing"),
        ({"medusa_num_heads": 2}, "which 2 heads of 1 blocks have not"),
        ({"medusa_num_heads": None}, "medusa_num_heads is None; Medusa heads need a whole number from 1 to 16"),
        ({"medusa_num_heads": 17}, "medusa_num_heads is 17"),
        ({"medusa_num_layers": "1"}, "medusa_num_layers is '1'; .* from 1 to 8"),
        ({"model_type": MODEL_TYPE}, "hidden_size is None"),
        (
            {"model_type": MODEL_TYPE, "hidden_size": 40, "num_tokens": 9, "tokenizer_hash": "x"},
            "tokenizer_hash is 'x', but must be of 64 hex digits",
        ),
        (
            {
                "model_type": MODEL_TYPE,
                "hidden_size": 40,
                "num_tokens": 9,
                "tokenizer_hash": HASH,
                "target_fingerprint": 7,
            },
            "target_fingerprint is 7, but must be of 64 hex digits",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, target, config, match):
    made = make_published(tmp_path / "heads", 40, VOCAB)
    change_heads(made, **config)
    refused(made, target, match)


def test_a_checkpoint_without_medusa_heads_is_refused(tmp_path, target):
    refused(tmp_path / "nowhere", target, "the directory .*nowhere of Medusa heads does not exist")
    refused(target, target, "medusa_num_heads is None")
    refused(tmp_path, target, "contains no Medusa heads: it has no config.json")
    made = make_published(tmp_path / "heads", 40, VOCAB)
    (made / PUBLISHED).unlink()
    (made / PICKLED).unlink()
    refused(made, target, "has neither medusa_lm_head.safetensors nor medusa_lm_head.pt")


@pytest.mark.skipif(default_model() != PREFERRED, reason="its weights are not here")
def test_the_default_models_matrix_is_found_in_its_file():
    """It is the embedding's, in blocks."""
    model = Path(resolve_model(PREFERRED, "target"))
    info = describe(model, engine="torch", name="x", dtype="float32", vocab_size=1, max_length=1, kv_slots=1)
    matrix = output_matrix(model)
    assert matrix.shape == (info.num_tokens, 576)
    assert np.isfinite(matrix.numpy()).all()

"""An inflated model says what the small one says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from specq.cli import main
from specq.drafting.draft_model.contexts import Contexts
from specq.engines.torch.engine import TorchEngine
from specq.models import Shape, resolve_model
from specq.models.inflate import _write_tokenizer, inflate, write
from specq.protocol.errors import ConfigError
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, random_tokens, reference_logits
from specq.testing.checkpoints_draft import PARALLEL, draft_logits, head_tokens, make_draft, places_logits
from specq.testing.checkpoints_gguf import write_gguf
from specq.text import TOKENIZER_FILES
from tests.each import each

TEXT = [5, 9, 33, 7, 61, 2, 80]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden 40, 3 layers, 4 heads of 16 on 2 key-value heads, intermediate 72, vocabulary 99."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("small"))


SHAPES = {
    "wider": (80, 3, 4, 2, 16, 72, 99),
    "deeper": (40, 5, 4, 2, 16, 72, 99),
    "more heads": (40, 3, 20, 5, 16, 72, 99),
    "larger heads": (40, 3, 4, 2, 32, 72, 99),
    "more columns": (40, 3, 4, 2, 16, 144, 99),
    "more tokens": (40, 3, 4, 2, 16, 72, 150),
    "all, untied": (96, 5, 12, 3, 32, 144, 150, False),
    "qwen2": (96, 4, 6, 2, 16, 80, 120, False, True),
}


@each("sizes", SHAPES.values())
def test_logits_are_those_of_the_small_model(small, sizes):
    large = inflate(small, Shape(*sizes), dtype=torch.float32)
    reference, rng = load_reference(small), np.random.default_rng(0)
    for length in (1, 7, 40):
        token_ids = random_tokens(rng, length).tolist()
        expected, found = reference_logits(reference, token_ids), reference_logits(large, token_ids)
        torch.testing.assert_close(found[:VOCAB], expected, atol=1e-4, rtol=1e-4)
        is_copied = torch.isclose(found[VOCAB:, None], expected, atol=1e-4, rtol=1e-4)  # [extra rows, rows]
        assert is_copied.all(0).any()


def check_same(large, small, token_ids, known=slice(VOCAB)):
    """Assert that a large model says of known tokens what a small one does."""
    torch.testing.assert_close(reference_logits(large, token_ids)[known], small[known], atol=1e-4, rtol=1e-4)


def test_fourfold_widths_are_exact_in_bfloat16(small):
    """All scales are powers of two then; so no weight that counts is rounded."""
    shape = Shape(160, 4, 16, 4, 16, 288, 99)
    rounded = inflate(small, shape, dtype=torch.bfloat16).float()
    reference = load_reference(small)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16().float())
    token_ids = random_tokens(np.random.default_rng(1), 20).tolist()
    check_same(rounded, reference_logits(reference, token_ids), token_ids)


@each(
    ("changes", "message"),
    [
        ({"hidden": 39}, "hidden=39 is less than the small model's 40"),
        ({"head_dim": 24}, "head_dim must be a multiple of 16"),
        ({"heads": 5}, "heads one of kv_heads"),
        ({"heads": 6}, "hidden must be a multiple of heads"),
        ({"heads": 8, "kv_heads": 8}, "a key-value head needs at least 2 heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(small, changes, message):
    sizes = {"hidden": 40, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 72, "vocab": 99}
    with pytest.raises(ConfigError, match=message):
        inflate(small, Shape(**(sizes | changes)), dtype=torch.float32)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["models", "inflate", *arguments])


def test_an_unknown_size_is_named(tmp_path):
    result = run("--out", str(tmp_path), "--target-shape", "width=3")
    assert result.exit_code == 2
    assert "'width' is not a size of a shape; known: hidden, layers" in result.output
    assert "unknown shape 'x'" in run("--out", str(tmp_path), "--target", "x").output


def greedy_difference(small, large, prompt: list[int], count: int) -> tuple[int, float] | None:
    """Follow the small model's greedy text; return (token, gap of its two best logits) of the first disagreement.

    small, large: token ids -> logits [vocab] of the next token. None: no disagreement in `count` tokens.
    """
    text = list(prompt)
    for index in range(count):
        logits = small(text).float()
        best = logits.topk(2)
        token = int(best.indices[0])
        if int(large(text).argmax()) != token:
            return index, float(best.values[0] - best.values[1])
        text.append(token)
    return None


@pytest.mark.slow
def test_written_checkpoints_load_and_write_the_same_greedy_text(tmp_path):
    shapes = {"target": "hidden=512,layers=13,heads=8,kv_heads=2,intermediate=800,vocab=4100"}
    shapes["draft"] = "hidden=384,layers=3,heads=6,kv_heads=2,intermediate=500,vocab=4100"
    options = [f"--{role}-shape={sizes}" for role, sizes in shapes.items()]
    result = run("--out", str(tmp_path), "--target=cpu-target", "--draft=cpu-draft", "--dtype=float32", *options)
    assert result.exit_code == 0, result.output
    for role in ("target", "draft"):
        source = resolve_model("tiny", role)
        models = (load_reference(directory) for directory in (source, tmp_path / role))
        small, large = (lambda text, model=model: reference_logits(model, text) for model in models)
        difference = greedy_difference(small, large, [1, 300, 17, 40, 900], 24)
        assert difference is None or difference[1] < 1e-3
        own, other = (TorchEngine(str(path), device="cpu", kv_slots=64).info for path in (source, tmp_path / role))
        assert (own.tokenizer_hash, own.eos_ids) == (other.tokenizer_hash, other.eos_ids)
        assert other.vocab_size == 4100
        assert other.fingerprint != own.fingerprint


def test_a_difference_is_found_with_its_gap():
    answers = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.5, 0.0]])
    small = lambda text: answers[len(text) - 1]  # noqa: E731
    large = lambda text: answers[len(text) - 1] + torch.tensor([0.0, 1.0, 0.0])  # noqa: E731
    assert greedy_difference(small, large, [9], 1) is None
    assert greedy_difference(small, large, [9], 2) == (1, 0.5)


# --- other small models -----------------------------------------------------------------------------------------------


def test_a_gguf_file_is_inflated_as_the_checkpoint_that_it_holds(small, tmp_path):
    path = write_gguf(small, tmp_path / "small.gguf", linear=gguf.GGMLQuantizationType.F32)
    large = inflate(path, Shape(96, 5, 12, 3, 32, 144, 150, tied=False), dtype=torch.float32)
    token_ids = random_tokens(np.random.default_rng(2), 20).tolist()
    check_same(large, reference_logits(load_reference(small), token_ids), token_ids)


DRAFT = Shape(96, 3, 8, 4, 32, 90, 128, tied=False)


def test_a_draft_model_of_our_own_form_becomes_a_plain_llama(tmp_path):
    """Tokens that its head lacks share the logit of one that it has, which is held for less likely than others."""
    directory = make_draft(tmp_path / "draft")
    large = inflate(directory, DRAFT, dtype=torch.float32)
    expected, found = draft_logits(directory, TEXT), reference_logits(large, TEXT)
    known = torch.tensor(head_tokens(directory))
    check_same(large, expected, TEXT, known)
    others = torch.ones(DRAFT.vocab, dtype=torch.bool)
    others[known] = False
    assert found[others].max() - found[others].min() < 1e-4
    assert torch.isclose(expected[known], found[others][0], atol=1e-4).any()


def test_a_parallel_draft_model_stays_one(tmp_path):
    """Its masks are the last of the larger vocabulary; what it says of each place is what the small one says."""
    directory = make_draft(tmp_path / "parallel", PARALLEL)
    tokenizer = make_checkpoint("llama", tmp_path / "target")
    (tokenizer / "tokenizer_config.json").write_text("{}")
    write(directory, tmp_path / "large", DRAFT, dtype="float32", tokenizer=tokenizer)
    contexts = Contexts(str(tmp_path / "large"), device="cpu", kv_slots=64)
    assert contexts.num_masks == DRAFT.vocab - contexts.info.vocab_size == PARALLEL.num_places - 1
    large = load_reference(tmp_path / "large")
    masks = [contexts.info.vocab_size + i for i in range(contexts.num_masks)]
    with torch.inference_mode():
        found = large(torch.tensor([TEXT + masks])).logits[0, -PARALLEL.num_places :]
    expected = places_logits(directory, TEXT, PARALLEL.num_places)
    known = torch.tensor(head_tokens(directory))
    torch.testing.assert_close(found[:, known], expected[:, known], atol=1e-4, rtol=1e-4)


def test_a_number_of_places_that_cannot_be_is_refused(small, tmp_path):
    shutil.copytree(small, tmp_path / "draft")
    said = json.loads((small / "config.json").read_text())
    for wrong in (0, 17, "4", True):
        (tmp_path / "draft" / "config.json").write_text(json.dumps(said | {"num_places": wrong}))
        with pytest.raises(ConfigError, match=r"num_places is .*, but must be a whole number from 1 to 16"):
            Contexts(str(tmp_path / "draft"), device="cpu", kv_slots=64)


def test_all_files_of_the_tokenizer_are_copied(tmp_path):
    for name in TOKENIZER_FILES:
        (tmp_path / "small" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "small" / name).write_text(f"{name}: é", "utf-8")
    (tmp_path / "large").mkdir()
    _write_tokenizer(tmp_path / "small", tmp_path / "large")
    for name in TOKENIZER_FILES:
        assert (tmp_path / "large" / name).read_text("utf-8") == f"{name}: é"

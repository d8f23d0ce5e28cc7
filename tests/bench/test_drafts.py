"""Draft models that are made on the spot: worse than the bundled one in the way that was asked for, and alike
otherwise."""

import pytest
import torch
from safetensors.torch import load_file

from bench.drafts import make_random_draft, make_weak_draft
from specq.models import resolve_model
from specq.testing.checkpoints import load_reference
from specq.text.codec import load_tokenizer_files, tokenizer_hash

BUNDLED = resolve_model("tiny", "draft")


def parameters(folder):
    return {name: parameter.detach() for name, parameter in load_reference(folder).named_parameters()}


def same_tokenizer(folder) -> bool:
    ours, theirs = (load_tokenizer_files(place)["tokenizer.json"] for place in (folder, BUNDLED))
    return tokenizer_hash(ours) == tokenizer_hash(theirs)


def test_random_draft(tmp_path):
    """A random draft has the bundled draft's tokenizer and shape, and other weights."""
    make_random_draft("tiny", tmp_path)
    ours, theirs = parameters(tmp_path), parameters(BUNDLED)
    assert same_tokenizer(tmp_path)
    assert {name: p.shape for name, p in ours.items()} == {name: p.shape for name, p in theirs.items()}
    assert any((ours[name] != theirs[name]).any() for name in ours)


@pytest.mark.parametrize("noise", [0.0, 0.15, 0.5])
def test_weak_draft_has_the_noise_that_was_asked_for(tmp_path, noise):
    """The noise of each matrix is the given multiple of its standard deviation. Norms stay unchanged."""
    make_weak_draft("tiny", tmp_path, noise)
    assert same_tokenizer(tmp_path)
    ours, theirs = parameters(tmp_path), parameters(BUNDLED)
    for name, weight in theirs.items():
        wanted = noise if weight.ndim > 1 else 0.0
        assert float((ours[name] - weight).std() / weight.std()) == pytest.approx(wanted, rel=0.03), name


@pytest.mark.parametrize("make", [make_random_draft, make_weak_draft])
def test_made_drafts_are_the_same_each_time(tmp_path, make):
    """Figures of two runs are of the same model; another seed makes another one."""
    files = [tmp_path / name for name in ("first", "second", "other")]
    for folder, seed in zip(files, (0, 0, 1), strict=True):
        make("tiny", folder, seed=seed)
    first, second, other = ((folder / "model.safetensors").read_bytes() for folder in files)
    assert first == second != other


def test_weak_drafts_cost_what_the_bundled_one_costs(tmp_path):
    """The weights stay in the number format in which they were stored."""
    make_weak_draft("tiny", tmp_path)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}

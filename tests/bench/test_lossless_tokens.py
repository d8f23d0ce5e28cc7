"""Texts held against transformers' logits token by token: what is equal, and what a planted error is told as."""

import pytest
import torch

from bench.lossless_tokens import Reader, check
from specq.client import Result
from specq.protocol import SamplingParams
from specq.testing.checkpoints import load_reference, make_checkpoint, reference_text
from specq.verification.sampling import perturbed_scores

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reader(path):
    return Reader(str(path))


def sampled_text(path, params, count):
    """Return what the rule gives, one token and one forward pass after the other."""
    model, text = load_reference(path), list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([text])).logits[0, -1:].float()
            text.append(int(perturbed_scores(logits, [params], [len(text)])[0].argmax()))
    return text[len(PROMPT) :]


def test_the_targets_own_text_is_equal(path, reader):
    """Greedy and with a seed; with another seed the same text is not."""
    assert reader.differences(PROMPT, reference_text(load_reference(path), PROMPT, 9), SamplingParams()) == []
    params = SamplingParams(temperature=0.8, seed=3)
    text = sampled_text(path, params, 9)
    assert reader.differences(PROMPT, text, params) == []
    assert reader.differences(PROMPT, text, SamplingParams(temperature=0.8, seed=4))


def test_a_wrong_token_is_told_with_its_gap(path, reader):
    """The first that differs is the planted one, and no near tie, so the check fails."""
    text = reference_text(load_reference(path), PROMPT, 9)
    wrong = [*text[:4], (text[4] + 1) % 99, *text[5:]]
    first = reader.differences(PROMPT, wrong, SamplingParams())[0]
    assert (first["token"], first["said"], first["target"]) == (4, wrong[4], text[4])
    assert first["gap"] > 1e-3
    stats = {"draft_tokens": 4, "accepted_tokens": 3}
    results = [Result("1", "", token_ids=tokens, stats=stats) for tokens in (text, wrong)]
    found = check(reader, [PROMPT, PROMPT], results, 0.0)
    assert (found["texts"], found["equal"], found["passed"], found["accepted_tokens"]) == (2, 1, False, 6)
    assert check(reader, [PROMPT], results[:1], 0.0)["passed"]

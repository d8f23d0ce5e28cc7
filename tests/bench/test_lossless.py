"""`specq bench lossless`: which texts count as equal, when it passes, how it reports an error, and a minimal run."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench import lossless
from bench.lossless import (
    GREEDY,
    SAMPLED,
    STEPS,
    WAYS,
    Reader,
    Variant,
    check,
    check_plain,
    check_vllm,
    exact,
    first_difference,
    passed,
    step_of,
    vllm_variants,
)
from specq.cli import main
from specq.client import Result
from specq.protocol import SamplingParams
from specq.testing.checkpoints import load_reference, make_checkpoint, reference_text
from specq.verification.sampling import perturbed_scores

NEAR, WIDE = {"near_tie": True}, {"near_tie": False}


def test_only_near_ties_are_excused():
    plain = Variant("plain", 0, 1, mode="plain")
    assert passed(plain, {"differing": [NEAR]})
    assert not passed(plain, {"differing": [NEAR, WIDE]})


@pytest.mark.parametrize(("accepted", "wanted"), [(0, False), (3, True), (8, False)])
def test_drafters_must_be_right_and_wrong(accepted, wanted):
    """Where all or none is accepted, equal texts show nothing; with random weights that is expected."""
    found = {"differing": [], "draft_tokens": 8, "accepted_tokens": accepted}
    assert passed(Variant("drafters", 1, 1), found) == wanted
    assert passed(Variant("random", 1, 1, random_draft=True), found)


def test_texts_of_plain_decoding_have_no_near_ties():
    """They are those of the same arithmetic."""
    stats = {"draft_tokens": 0, "accepted_tokens": 0}
    plain, other, shorter = (Result("1", "", token_ids=ids, stats=stats) for ids in ([1, 2, 3], [1, 5, 3], [1, 2]))
    found = check_plain([plain] * 3, [plain, other, shorter])
    assert (found["equal"], found["passed"]) == (1, False)
    assert [(one["prompt"], one["token"]) for one in found["differing"]] == [(1, 1), (2, 2)]
    assert check_plain([plain], [plain])["passed"]


def test_texts_that_transformers_reads_are_of_exact_arithmetic(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    way = exact(WAYS[-1], str(tmp_path / "model.gguf"))
    assert way.target == {"drafts": "always", "engine_options": ('arithmetic="exact"',)}
    assert exact(WAYS[-1], "tiny") == WAYS[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_suite_on_two_prompts(tmp_path, monkeypatch):
    """transformers, plain decoding and a drafter say the same."""
    monkeypatch.setattr(lossless, "GREEDY", GREEDY[:1])
    monkeypatch.setattr(lossless, "SAMPLED", SAMPLED[:1])
    out = tmp_path / "lossless.json"
    outcome = CliRunner().invoke(main, ["bench", "lossless", "--limit", "2", "--max-tokens", "24", "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    assert {name: (one["texts"], one["passed"]) for name, one in report["results"].items()} == {
        GREEDY[0].name: (2, True),
        SAMPLED[0].name: (2, True),
    }
    assert [line.split()[-1] for line in outcome.stdout.splitlines()] == ["PASSED", "ok", "ok"]


# --- read by transformers -------------------------------------------------------------------------------------------

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


def test_a_text_ends_with_the_first_end_of_text_or_at_its_length(reader, monkeypatch):
    monkeypatch.setattr(reader, "_endings", {7})
    assert [reader.ends_well(text, 3) for text in ([1, 7], [1, 2, 3], [1, 2, 7])] == [True] * 3
    assert not any(reader.ends_well(text, 3) for text in ([1, 2], [7, 1, 2], [7, 7], []))


def test_a_wrong_token_is_reported_with_its_gap(path, reader):
    """The first that differs is the planted one, and no near tie, so the check fails."""
    text = reference_text(load_reference(path), PROMPT, 9)
    wrong = [*text[:4], (text[4] + 1) % 99, *text[5:]]
    first = reader.differences(PROMPT, wrong, SamplingParams())[0]
    assert (first["token"], first["said"], first["target"]) == (4, wrong[4], text[4])
    assert first["gap"] > 1e-3
    stats = {"draft_tokens": 4, "accepted_tokens": 3}
    results = [Result("1", "", token_ids=tokens, stats=stats) for tokens in (text, wrong)]
    found = check(reader, [PROMPT, PROMPT], results, 0.0, 9)
    assert (found["texts"], found["equal"], found["passed"], found["accepted_tokens"]) == (2, 1, False, 6)
    assert check(reader, [PROMPT], results[:1], 0.0, 9)["passed"]
    assert not check(reader, [PROMPT], results[:1], 0.0, 10)["passed"], "it ends too early"


# --- beside vLLM's own ----------------------------------------------------------------------------------------------

WANTED = [7, 8, 9]


def best_of(*gaps, logit=20.0):
    """At place i the best token is WANTED[i], the next best 100 + i, lower by a gap."""
    return [[(WANTED[i], logit), (100 + i, logit - gap)] for i, gap in enumerate(gaps)]


@pytest.mark.parametrize("logit", [1.0, 1.5, -3.75, 20.0, 1e-3])
def test_a_step_is_that_of_the_precision(logit):
    """Beside numpy's own distance between neighbours, where numpy has the type."""
    for name in ("float32", "float16"):
        assert step_of(logit, name) == abs(np.spacing(np.dtype(name).type(logit)))
    assert step_of(logit, "bfloat16") == 8 * step_of(logit, "float16")


def test_equal_texts_have_no_difference():
    assert first_difference(WANTED, WANTED, best_of(1, 1, 1), "float32") == {}


def test_the_first_difference_is_reported_with_its_gap():
    found = first_difference([7, 101, 5], WANTED, best_of(1, 0.5, 1), "bfloat16")
    assert (found["token"], found["said"], found["wanted"], found["gap"]) == (1, 101, 8, 0.5)
    assert found["steps"] == 0.5 / 0.125  # 20 is between 16 and 32, which bfloat16 divides into 128


@pytest.mark.parametrize(
    ("said", "dtype", "gap", "is_tie"),
    [
        (101, "bfloat16", STEPS * 0.125, True),
        (101, "bfloat16", STEPS * 0.125 + 0.01, False),
        (101, "float32", 0.125, False),
        (55, "bfloat16", 0.0, False),  # a third token
    ],
)
def test_only_the_two_best_within_a_few_steps_are_a_near_tie(said, dtype, gap, is_tie):
    assert first_difference([7, said, 9], WANTED, best_of(1, gap, 1), dtype)["near_tie"] is is_tie


@pytest.mark.parametrize("said", [[7, 8], [7, 8, 9, 1]])
def test_a_text_of_another_length_is_not_a_near_tie(said):
    found = first_difference(said, WANTED, best_of(0, 0, 0), "bfloat16")
    assert (found["said"], found["wanted"], found["near_tie"]) == (len(said), 3, False)


def test_texts_pass_if_each_difference_is_a_near_tie():
    theirs = [{"token_ids": WANTED, "best": best_of(1, 0, 1)}] * 2
    stats = {"draft_tokens": 4, "accepted_tokens": 3}

    def results(*texts):
        return [Result(None, None, token_ids=text, finish_reason="length", stats=stats) for text in texts]

    tied = check_vllm([[1], [2]], theirs, results(WANTED, [7, 101, 9]), "float32")
    assert (tied["texts"], tied["equal"], tied["passed"], tied["accepted_tokens"]) == (2, 1, True, 6)
    assert [one["prompt"] for one in tied["differing"]] == [1]
    assert not check_vllm([[1], [2]], theirs, results(WANTED, [100, 8, 9]), "float32")["passed"]


def test_each_way_asks_for_the_vllm_engine_and_uses_all_drafts():
    for variant in vllm_variants("float32", {"engine_options": ("a=1",)}):
        assert variant.target == {
            "engine": "vllm", "dtype": "float32", "drafts": "always", "engine_options": ("a=1",)
        }  # fmt: skip

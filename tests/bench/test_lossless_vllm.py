"""Texts held against vLLM's own: what is equal, what is a near tie in which precision, and what is neither."""

import numpy as np
import pytest

from bench.lossless_vllm import STEPS, check, first_difference, step_of, variants
from specq.client import Result

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


def test_the_first_difference_is_told_with_its_gap():
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
def test_a_text_of_another_length_is_no_near_tie(said):
    found = first_difference(said, WANTED, best_of(0, 0, 0), "bfloat16")
    assert (found["said"], found["wanted"], found["near_tie"]) == (len(said), 3, False)


def test_texts_pass_if_each_difference_is_a_near_tie():
    theirs = [{"token_ids": WANTED, "best": best_of(1, 0, 1)}] * 2
    stats = {"draft_tokens": 4, "accepted_tokens": 3}

    def results(*texts):
        return [Result(None, None, token_ids=text, finish_reason="length", stats=stats) for text in texts]

    tied = check([[1], [2]], theirs, results(WANTED, [7, 101, 9]), "float32")
    assert (tied["texts"], tied["equal"], tied["passed"], tied["accepted_tokens"]) == (2, 1, True, 6)
    assert [one["prompt"] for one in tied["differing"]] == [1]
    assert not check([[1], [2]], theirs, results(WANTED, [100, 8, 9]), "float32")["passed"]


def test_each_way_asks_for_the_vllm_engine_and_uses_all_drafts():
    for variant in variants("float32", {"engine_options": ("a=1",)}):
        assert variant.target == {
            "engine": "vllm", "dtype": "float32", "drafts": "always", "engine_options": ("a=1",)
        }  # fmt: skip

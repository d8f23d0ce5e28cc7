"""What each method of `specq train` for a target that exists refuses, in one line that says what is missing."""

from __future__ import annotations

import re

import pytest

from specq import training
from tests.each import each
from tests.training.stages import USELESS, places_with_bench, refusal, run_on, runner

CORPUS = "a corpus is a directory of *.jsonl.gz, *.jsonl, *.txt files, or one such file; there is no"
NO_ROLLOUTS, NO_DRAFT = "run the stage 'rollouts'", "run the stage 'draft'"
STAGES = {  # of each method: those in which something is missing, and what
    "block": {"rollouts": CORPUS, "drafter": NO_ROLLOUTS, "evaluate": "does not exist"},
    "draft": {"rollouts": CORPUS, "draft": NO_ROLLOUTS, "evaluate": NO_DRAFT},
    "eagle3": {"rollouts": CORPUS, "head": NO_ROLLOUTS, "evaluate": "does not exist"},
    "medusa": {"rollouts": CORPUS, "heads": NO_ROLLOUTS, "evaluate": "does not exist"},
    "parallel": {"rollouts": CORPUS, "draft": NO_ROLLOUTS, "evaluate": "there is no parallel draft model in"},
}
LEARNERS = {  # the stage that learns, an option, who learns from an answer of how many tokens at least
    "block": ("drafter", "--block-size=4", "blocks of 4 tokens", 4),
    "eagle3": ("head", "--num-steps=3", "3 steps", 4),
    "medusa": ("heads", "--num-heads=2", "2 heads", 3),
    "parallel": ("draft", "--num-places=3", "3 places", 3),
}


@pytest.mark.parametrize("method", STAGES)
def test_what_a_stage_lacks_is_named(method, tmp_path):
    run, places = runner(method, ["--device=cpu"]), places_with_bench(tmp_path)
    said = {stage: refusal(run(places, stage)) for stage in STAGES[method]}
    assert [(stage, said[stage]) for stage, missing in STAGES[method].items() if missing not in said[stage]] == []
    assert STAGES[method].keys() == getattr(training, f"{method.removesuffix('3').upper()}_STAGES").keys()


@each(("method", "useless"), [(method, useless) for method in LEARNERS for useless in USELESS])
def test_rollouts_of_no_use_are_refused(method, useless, tmp_path):
    (stage, option, who, least), (pairs, match) = LEARNERS[method], useless
    run = runner(method, ["--device=cpu", "--batch-tokens=128", "--seconds=1.5", option])
    assert re.search(match.format(who=who, least=least), refusal(run_on(run, tmp_path, pairs, stage)))

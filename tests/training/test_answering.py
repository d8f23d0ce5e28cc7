"""The stage `rollouts`: what prompts there are, that its time is kept, and that it says how far it is; and what
commands look at before they begin."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specq.samples import DATA
from specq.training import answering, progress
from specq.training.chat_prompts import bench_prompts, chat_of, corpus_prompts, is_held_out, renumbered
from specq.training.records import prompt_paths, read_questions
from specq.training.rollouts import load_rollouts
from tests.each import each
from tests.training.stages import TARGET, make_places, refusal, runner

run = runner("medusa", ["--device=cpu", "--rollout-tokens=40"])
pytestmark = pytest.mark.timeout(120)


def parts_of(places) -> list:
    return [load_rollouts(path) for path in sorted((places["work"] / "rollouts").iterdir())]


def ticking(monkeypatch, step_s: float) -> None:
    """Let each look at the clock of rollouts take so long."""
    seconds = itertools.count(0.0, step_s)
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


# --- time -------------------------------------------------------------------------------------------------------------


def test_answers_end_where_the_time_is_over_and_count(tmp_path, monkeypatch):
    """A batch that would take longer than the time is cut short; another run goes on with the prompts after it."""
    places = make_places(tmp_path)
    ticking(monkeypatch, 1.0)
    result = run(places, "--rollout-seconds=1", "--rollout-rows=4", "rollouts")
    assert result.exit_code == 0, result.output
    (first,) = parts_of(places)
    said = np.diff(first.bounds) - first.prompt_sizes
    assert len(said) == 4
    assert said.max() == answering.LEAST_TOKENS, "no less, or nothing could be learned"

    ticking(monkeypatch, 0.01)
    result = run(places, "--rollout-seconds=100", "--rollout-rows=4", "rollouts")
    assert "7 of 7 prompts" in result.output
    sizes = [len(part.prompt_sizes) for part in parts_of(places)]
    assert sizes == [4, 3]


@each(("seconds", "sizes"), [(1000, [5, 2]), (200, [2, 2, 2, 1])])
def test_a_batch_has_as_many_prompts_as_pass_within_a_part_of_the_time(seconds, sizes, tmp_path, monkeypatch):
    """By the clock two prompts pass in 20 s, so that five pass in a twentieth of 1000 s; two is the least."""
    places = make_places(tmp_path)
    monkeypatch.setattr(answering, "FEW_ROWS", 2)
    moments = itertools.chain([0.0, 0.0, 20.0], itertools.repeat(20.0))  # the start, and before and after the pass
    monkeypatch.setattr(answering, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    result = run(places, f"--rollout-seconds={seconds}", "--rollout-tokens=2", "rollouts")
    assert result.exit_code == 0, result.output
    assert [len(part.prompt_sizes) for part in parts_of(places)] == sizes


def test_how_far_it_is_comes_about_once_a_second(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for is_terminal, lines in ((True, 11), (False, 2)):
        now[0] = 0.0
        shown = progress.Progress(is_terminal=is_terminal)
        for tenth in range(120):
            now[0] = tenth / 10
            shown.say(f"at {tenth}")
        assert capsys.readouterr().out.count("at ") == lines


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_come_from_json_lines_and_from_plain_ones(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "One?", "more": 1}\n{"text": "Two."}\n')
    (tmp_path / "b.txt").write_text("Three?\n\n  \nFour?\n")
    (tmp_path / "c.md").write_text("nothing")
    assert [path.name for path in prompt_paths(tmp_path)] == ["a.jsonl", "b.txt"]
    assert prompt_paths(tmp_path / "b.txt") == [tmp_path / "b.txt"]
    assert list(read_questions(tmp_path / "b.txt")) == [{"prompt": "Three?"}, {"prompt": "Four?"}]
    assert len(list(read_questions(tmp_path / "b.txt", 1))) == 1
    assert len(list(read_questions(tmp_path / "a.jsonl"))) == 2


def test_what_is_evaluated_was_not_trained_on():
    """Of the prompts that come with specq, no evaluated one is among those to learn from, and all are one or the
    other."""
    settings = SimpleNamespace(corpus=DATA, bench=DATA, limit=None, is_split=True, bench_prompts=1000)
    chat = chat_of(TARGET, (1,))
    learned = {tuple(ids) for ids in corpus_prompts(settings, chat, np.random.default_rng(0))}
    paths = sorted(DATA.glob("*.jsonl"))
    judged = {tuple(ids) for path in paths for ids in bench_prompts(path, chat, settings)}
    every = [json.loads(line)["prompt"] for path in paths for line in path.read_text("utf-8").splitlines()]
    assert not learned & judged
    assert len(judged) == 35
    assert len({tuple(chat.prompt(words)) for words in every} & learned) > 70, "those that are not too long"
    assert len(learned) > 500, "and the same questions with other numbers"


def test_every_fourth_record_is_held_out():
    assert [number for number in range(9) if is_held_out(number)] == [3, 7]


def test_a_question_keeps_its_words_and_gets_other_numbers():
    asked = renumbered("Ann has 16 figs and eats 3.", np.random.default_rng(0))
    assert asked != "Ann has 16 figs and eats 3."
    assert "".join("0" if c.isdigit() else c for c in asked) == "Ann has 00 figs and eats 0."


def test_without_a_corpus_there_are_prompts_that_come_along(tmp_path):
    places = {name: tmp_path / name for name in ("work", "out")}
    result = run(places, "--rollout-seconds=0", "--rollout-tokens=2", "rollouts")
    assert result.exit_code == 0, result.output
    assert len(parts_of(places)[0].prompt_sizes) == answering.FEW_ROWS


# --- what is looked at first ------------------------------------------------------------------------------------------


WRONG = {
    ("--corpus=/nowhere", "all"): "there is no /nowhere",
    ("--corpus=/nowhere", "rollouts"): "there is no /nowhere",
    ("--bench=/nowhere", "all"): "no *.jsonl benchmark in /nowhere",
    ("--rollouts=/nowhere.npz", "all"): "there is no file of rollouts /nowhere.npz",
    ("--target=/nowhere", "all"): "there is no model directory /nowhere",
}


@each(("arguments", "method"), itertools.product(WRONG, ["draft", "eagle3", "medusa", "parallel"]))
def test_a_wrong_place_is_refused(method, arguments, tmp_path):
    places = {name: tmp_path / name for name in ("work", "out")}
    assert WRONG[arguments] in refusal(runner(method, [])(places, *arguments))


def test_it_is_refused_before_torch_is_imported(tmp_path):
    code = """if True:
        import sys
        from click.testing import CliRunner
        from specq.cli import main
        for method in ("draft", "eagle3", "medusa", "parallel", "pair"):
            target = [] if method == "pair" else ["--target=tiny"]
            result = CliRunner().invoke(main, ["train", method, *target, "--corpus=nowhere", "all"])
            assert result.exit_code == 2 and "nowhere" in result.stderr, (method, result.output)
        assert not {"torch", "transformers"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])

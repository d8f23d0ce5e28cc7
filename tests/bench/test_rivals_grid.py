"""`specq bench rivals`: who takes turns on what, paired figures, going on with a report, and rivals in processes."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.rivals import field as fields
from bench.rivals import summary
from bench.rivals.children import Child, memory_of
from bench.rivals.field import Field, all_names
from bench.rivals.grid import JOBS_EACH, LENGTH, SLOW_EVERY, Cell, Grid, in_turns, measure_prefill
from bench.scenario import Completion
from specq.cli import main
from specq.protocol import EngineError
from specq.samples import Prompt
from specq.testing.checkpoints import load_reference, make_checkpoint, reference_text

PROMPTS = [Prompt(name, str(i), (5, 6, i)) for name in ("gsm8k", "mt_bench") for i in range(4)]
NOBODY = float("inf")


class Recorder:
    """A contestant without delays. It returns given answers, and records its requests."""

    concurrency = 0

    def __init__(self, name, rate=100.0, num_tokens=21):
        self.name, self.rate, self.num_tokens, self.asked = name, rate, num_tokens, []

    def run(self, prompts, settings):
        self.asked += [(prompt, settings) for prompt in prompts]
        seconds = (self.num_tokens - 1) / self.rate
        return [Completion([0] * self.num_tokens, 500.0, {"rounds": 10}, 1, 0.5 + seconds) for _ in prompts]


@pytest.fixture
def two_cores(monkeypatch):
    for module in (fields,):
        monkeypatch.setattr(module, "available_cores", lambda: [0, 1])


# --- the grid -----------------------------------------------------------------------------------------------------


def test_any_beginning_of_the_prompts_is_a_fair_sample():
    assert [prompt.dataset for prompt in in_turns(PROMPTS)] == ["gsm8k", "mt_bench"] * 4


def test_units_of_one_session_are_prompts_and_of_several_are_batches():
    assert Cell(0.0, 1).units(PROMPTS) == [(prompt,) for prompt in PROMPTS]
    batches = Cell(0.0, 2).units(PROMPTS)
    assert {len(batch) for batch in batches} == {2 * JOBS_EACH}
    assert {prompt for batch in batches for prompt in batch} == set(PROMPTS)


@pytest.mark.usefixtures("two_cores")
def test_who_takes_part():
    """transformers is slow, so it gets every third prompt; with several sessions it is about specq's own, and
    llama.cpp."""
    alone, many = Cell(0.0, 1), Cell(0.8, 4)
    assert [alone.takes_part("transformers", i) for i in range(SLOW_EVERY + 1)] == [True, False, False, True]
    assert alone.takes_part("llama.cpp 1", 1)
    assert [name for name in all_names() if many.takes_part(name, 0)] == [
        *("llama.cpp 2", "llama.cpp Q4_0", "plain", "lookup", "worker", "colocated"),
    ]


def test_a_rate_leaves_the_prompt_and_the_first_token_out():
    """With one session; with several, all tokens of specq count, over the seconds of all together."""
    contestant = Recorder("plain", rate=50.0)
    for cell, expected in ((Cell(0.0, 1), 50.0), (Cell(0.0, 4), None)):
        _, unit = next(Grid([cell], PROMPTS, 21).run([contestant], {}, NOBODY, lambda _: None))
        turn = unit["turns"]["plain"]
        assert turn["tokens"] == (20 if cell.sessions == 1 else 21 * 4 * JOBS_EACH)
        assert expected is None or turn["rate"] == pytest.approx(expected)


def test_a_grid_goes_on_where_it_was_stopped():
    """Completed units are not repeated. No unit begins after the end of the time."""
    grid, contestant = Grid([Cell(0.0, 1), Cell(0.8, 1)], PROMPTS, 21), Recorder("plain")
    first = dict([next(grid.run([contestant], {}, NOBODY, lambda _: None))])
    assert list(first) == ["greedy/1/0"]
    rest = dict(grid.run([contestant], first, NOBODY, lambda _: None))
    assert len(rest) == 2 * len(PROMPTS) - 1
    assert not set(first) & set(rest)
    assert grid.missing(first | rest) == []
    assert list(grid.run([contestant], {}, time.monotonic() - 1, lambda _: None)) == []


def test_contestants_get_the_same_prompt_and_seed_and_start_in_turn():
    one, other = Recorder("plain"), Recorder("lookup")
    order = []
    for contestant in (one, other):
        run = contestant.run
        contestant.run = lambda prompts, settings, c=contestant, f=run: order.append(c.name) or f(prompts, settings)
    grid = Grid([Cell(0.8, 1)], PROMPTS, 21)
    units = dict(grid.run([one, other], {}, NOBODY, lambda _: None))
    asked = [contestant.asked[-len(units) :] for contestant in (one, other)]
    assert asked[0] == asked[1]
    assert [settings.seed for _, settings in asked[0]] == list(range(len(PROMPTS)))
    assert {settings.temperature for _, settings in asked[0]} == {0.8}
    assert order[-4:] == ["plain", "lookup", "lookup", "plain"]


# --- figures ------------------------------------------------------------------------------------------------------


def unit(prompt="gsm8k/0", tokens=60, **rates):
    turns = {
        name.replace("_", " ").replace("llama", "llama.cpp"): {"tokens": tokens, "rate": rate, "rounds": tokens // 2}
        for name, rate in rates.items()
    }
    return {"prompts": [prompt], "turns": turns}


@pytest.mark.usefixtures("two_cores")
def test_ratios_are_of_one_unit():
    """A machine that becomes four times as slow changes none; a text that ends at once does not count."""
    units = {
        "greedy/1/0": unit(colocated=200.0, llama_2=100.0),
        "greedy/1/1": unit(colocated=50.0, llama_2=25.0),
        "greedy/1/2": unit(colocated=900.0, llama_2=1.0, tokens=3),
        "T=0.8/1/0": unit(colocated=130.0, llama_2=100.0),
    }
    rows = {(row[0], row[1]): row for row in summary.asked_table(units)[1:]}
    assert rows["colocated / llama.cpp 2", "greedy/1"][2:] == ("2.000", "2.000 to 2.000", "1.9", "2.5", "ok")
    assert rows["colocated / llama.cpp 2", "T=0.8/1"][-1] == "MISSED"
    assert rows["plain / llama.cpp 2", "greedy/1"][-1] == "not measured"


@pytest.mark.usefixtures("two_cores")
def test_the_default_is_held_against_the_better_of_plain_and_lookup():
    units = {"greedy/4/0": unit(plain=100.0, lookup=120.0, colocated=118.0)}
    rows = {(row[0], row[1]): row for row in summary.asked_table(units)[1:]}
    assert rows["colocated / best of plain and lookup", "greedy/4"][2] == "0.983"


@pytest.mark.usefixtures("two_cores")
def test_figures_and_tables_have_what_was_measured():
    units = {"greedy/1/0": unit(colocated=200.0, llama_2=100.0, plain=50.0)}
    found = summary.figures(units)
    assert found["greedy/1 colocated / llama.cpp 2"]["median"] == 2.0
    assert found["greedy/1 colocated / plain"]["median"] == 4.0
    assert "greedy/1 lookup tokens/s" not in found
    assert [row[1] for row in summary.table(units)[1:]] == ["llama.cpp 2", "plain", "colocated"]
    assert summary.dataset_table(units)[1][:2] == ("greedy/1", "gsm8k")


def test_no_prompt_of_the_prefill_begins_like_another():
    """Otherwise part of it would be in a prefix cache. The last prompt is the warm-up of all contestants."""
    recorder, texts = Recorder("plain"), [Prompt("x", "0", tuple(range(3000)))]
    for number in (0, 1, 2, -1):
        found = measure_prefill([recorder, Recorder("lookup")], texts, number)
    assert found == {"plain": LENGTH / 0.5}
    prompts = [prompt.token_ids for prompt, _ in recorder.asked]
    assert {len(prompt) for prompt in prompts} == {LENGTH}
    assert len({prompt[0] for prompt in prompts}) == 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux has it")
def test_memory_of_a_process():
    """The peak is at least what there is now; of a process that is gone, nothing."""
    import os

    found = memory_of({"this": os.getpid(), "gone": 2**22 + 1})
    assert found["this"]["peak_mb"] >= found["this"]["now_mb"] > 10
    assert "gone" not in found


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rival_that_cannot_load_says_why():
    with Child("transformers", "/nowhere/at/all", "tiny") as child, pytest.raises(EngineError, match="nowhere"):
        child.wait_ready()


def test_a_llama_that_cannot_complete_is_left_out_and_the_others_stay(monkeypatch, tmp_path):
    """As with a build that does not fit the processor: the notice says how to get another."""
    monkeypatch.setattr(fields, "is_installed", lambda: True)
    (tmp_path / "none.gguf").write_bytes(b"GGUF, but not really")
    said = []
    with fields.field(["llama.cpp 1"], str(tmp_path / "none.gguf"), "tiny", said.append) as found:
        assert found.contestants == []
    assert "llama.cpp 1 is left out" in said[0]
    assert "CMAKE_ARGS" in said[0]


@pytest.mark.slow
def test_transformers_in_a_process(tmp_path):
    """It says what the model says, refuses one call without an end of the process, and ends with its pipe."""
    paths = [make_checkpoint(kind, tmp_path / kind) for kind in ("llama", "qwen2")]
    expected = reference_text(load_reference(paths[0]), [5, 6, 7], 9)
    with Child("transformers", *paths) as child:
        assert child.wait_ready()["threads"] >= 1
        with pytest.raises(EngineError, match="unexpected keyword"):
            child.complete(token_ids=[5], max_tokens=1, colour="red")
        for assisted in (False, True):
            found = child.complete(token_ids=[5, 6, 7], max_tokens=9, ignore_eos=True, assisted=assisted)
            assert found["token_ids"] == expected
            assert 0 < found["first_s"] <= found["seconds"]
            assert 1 <= found["num_first"] <= 9
        process = child._process
    assert process.returncode == 0


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """The contestants of a run without processes."""
    from contextlib import contextmanager

    from bench.rivals import grid
    from bench.suites import rivals

    found = Field()
    found.contestants = [Recorder("plain"), Recorder("colocated", 200.0)]
    found.processes = {"specq": {}}

    @contextmanager
    def no_field(names, model, draft_model, tell, arithmetic):
        yield found

    monkeypatch.setattr(rivals, "field", no_field)
    monkeypatch.setattr(rivals, "is_installed", lambda: False)
    monkeypatch.setattr(grid, "SETTLE_S", 0.01)
    return found


def bench(*arguments):
    options = ["--model", "tiny", "--draft-model", "tiny", "--numseqs", "2", "--sessions", "1", "--temperature", "0"]
    return CliRunner().invoke(main, ["bench", "rivals", *options, *map(str, arguments)])


def test_a_report_is_gone_on_with(tmp_path, measured):
    """No unit begins after the time is over. A second call finds no work left."""
    out = tmp_path / "rivals.json"
    assert bench("--out", out, "--seconds", 0).exit_code == 0
    assert json.loads(out.read_text())["results"]["units"] == {}
    outcome = bench("--out", out, "--resume", "--prefill-repeats", 2)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    assert len(report["results"]["units"]) == 6
    assert len(report["results"]["prefill"]) == 2
    assert report["figures"]["greedy/1 colocated / plain"]["median"] == 2.0
    num_asked = len(measured.contestants[0].asked)
    assert bench("--out", out, "--resume", "--prefill-repeats", 2).exit_code == 0
    assert len(measured.contestants[0].asked) == num_asked


def test_without_llama_cpp_it_says_how_to_get_it(measured):
    outcome = bench("--prefill-repeats", 0)
    assert outcome.exit_code == 0, outcome.output
    assert "pip install -e '.[rivals]'" in outcome.stdout


def test_a_directory_without_prompts_is_refused(tmp_path, measured):
    outcome = bench("--prompts", tmp_path)
    assert outcome.exit_code != 0
    assert "no file that ends in .jsonl" in str(outcome.stderr) + str(outcome.exception)

"""`specq bench methods`: who takes part and how it is served, the figures, and two methods in real processes."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.method_figures import (
    MeasuredMethod,
    accepted_by_depth,
    cells_of,
    costs_of,
    dataset_table,
    method_table,
    to_best,
)
from bench.methods import KINDS, DraftFiles, ServedMethod, choose, config_of
from bench.scenario import Completion
from bench.suites.methods import portions
from bench.turns import Turn
from specq.checkpoints import weight_bytes
from specq.cli import main
from specq.models import parallel_for, resolve_model
from specq.protocol.errors import ConfigError
from specq.samples import Prompt
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_draft import MADE, PARALLEL, make_draft
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.checkpoints_heads import make_published

PROMPTS = (Prompt("a", "0", (1,)), Prompt("b", "1", (2,)))


@pytest.fixture
def files(tmp_path):
    """One model of each kind."""
    return DraftFiles(
        draft=str(make_draft(tmp_path / "draft", MADE)),
        parallel=str(make_draft(tmp_path / "parallel", PARALLEL)),
        heads=(
            str(make_eagle(tmp_path / "eagle", eagle_shape_of(48, 99, 40, layers=(0, 1, 2)))),
            str(make_published(tmp_path / "medusa", 48, 99)),
            str(make_block(tmp_path / "block", block_shape_of(48, 99, (0, 2)))),
        ),
    )


# --- who takes part -----------------------------------------------------------------------------------------------


def test_all_methods_take_part_for_which_there_are_files(files):
    """In the order of the table, with their weights; without any file those that need none."""
    assert [method.name for method in choose(files, ())] == list(KINDS)
    assert [method.name for method in choose(DraftFiles(), ())] == [kind for kind, needs in KINDS.items() if not needs]
    by_name = {method.name: method for method in choose(files, ())}
    one = {name: weight_bytes(Path(name)) for name in (files.draft, files.parallel, *files.heads)}
    assert by_name["plain"].num_bytes == by_name["lookahead"].num_bytes == 0
    assert by_name["draft-worker"].num_bytes == by_name["draft-colocated"].num_bytes == one[files.draft] > 0
    assert by_name["medusa"].num_bytes == one[files.heads[1]]
    assert by_name["everything"].num_bytes == one[files.draft] + one[files.parallel] + one[files.heads[0]]


def test_only_methods_that_are_named_take_part_beside_plain(files):
    assert [method.name for method in choose(files, ("eagle3", "lookup"))] == ["plain", "lookup", "eagle3"]


@pytest.mark.parametrize(
    ("arguments", "draft", "parallel"),
    [
        (("--target", "smollm2"), "smollm2", "smollm2-parallel"),
        (("--target", "smollm2", "--parallel", ""), "smollm2", ""),
        (("--target", "smollm2", "--parallel", "other", "--draft", ""), "", "other"),
        (("--target", "tiny"), "tiny", ""),
    ],
)
def test_what_comes_with_the_target_takes_part_unless_another_is_named(monkeypatch, arguments, draft, parallel):
    def refuse(files, kinds):
        raise ConfigError(f"asked: {files}")

    monkeypatch.setattr("bench.suites.methods.choose", refuse)
    outcome = bench(*arguments)
    assert f"asked: {DraftFiles(draft, parallel)}" in outcome.stderr


def test_the_bundled_parallel_draft_model_is_one():
    methods = choose(DraftFiles("smollm2", parallel_for("smollm2")), ("parallel-colocated", "parallel-worker"))
    assert [method.name for method in methods] == ["plain", "parallel-colocated", "parallel-worker"]


def test_heads_of_one_kind_are_distinguished_by_directory_name(files, tmp_path):
    """By their directories' names, which must differ then."""
    other = str(make_published(tmp_path / "other", 48, 99))
    both = DraftFiles(heads=(files.heads[1], other))
    assert [method.name for method in choose(both, ("medusa",))] == ["plain", "medusa medusa", "medusa other"]
    same = str(make_published(tmp_path / "deep" / "medusa", 48, 99))
    with pytest.raises(ConfigError, match="'medusa medusa'; rename one"):
        choose(DraftFiles(heads=(files.heads[1], same)), ())


@pytest.mark.parametrize("kind", [kind for kind, needs in KINDS.items() if needs])
def test_a_method_without_its_files_is_refused(kind):
    with pytest.raises(ConfigError, match=rf"{kind} needs .*\(--(draft|parallel|heads)\)"):
        choose(DraftFiles(), (kind,))


def test_files_that_are_something_else_are_refused(files, tmp_path):
    """An ordinary draft model foresees one token; what is no heads has no config.json of any."""
    with pytest.raises(ConfigError, match="not a parallel draft model"):
        choose(DraftFiles(parallel=files.draft), ())
    with pytest.raises(ConfigError, match="medusa_num_heads"):
        choose(DraftFiles(heads=(files.draft,)), ())
    with pytest.raises(ConfigError, match="no directory of heads"):
        choose(DraftFiles(heads=(str(tmp_path / "none"),)), ())


# --- how they are served ------------------------------------------------------------------------------------------


def sources(config) -> set[str]:
    """Return what drafts in a deployment."""
    target = config.target
    found = {name for name in ("lookahead", "draft_model", "heads", "shared_tokens") if getattr(target, name)}
    found |= {"lookup"} if target.prompt_lookup != "none" else set()
    return found | ({"worker"} if config.up.drafters else set())


def test_each_method_drafts_alone_and_always(files):
    """No other source drafts beside it. Its drafts are used even if they do not pay."""
    found = {method.name: config_of(method, "tiny") for method in choose(files, ()) if method.kind != "everything"}
    assert {name: sources(config) for name, config in found.items()} == {
        "plain": set(),
        "lookup": {"lookup"},
        "suffix": {"lookup", "shared_tokens"},
        "lookahead": {"lookahead"},
        "draft-colocated": {"draft_model"},
        "draft-worker": {"worker"},
        "parallel-colocated": {"draft_model"},
        "parallel-worker": {"worker"},
        "medusa": {"heads"},
        "eagle3": {"heads"},
        "eagle3-suffix": {"heads", "lookup", "shared_tokens"},
        "block": {"heads"},
    }
    assert {config.target.drafts for config in found.values()} == {"always"}
    assert found["draft-worker"].draft.model == files.draft
    assert found["parallel-worker"].draft.model == files.parallel
    assert found["parallel-colocated"].target.draft_model == files.parallel
    assert (found["medusa"].target.heads, found["eagle3"].target.heads) == (files.heads[1], files.heads[0])


def test_everything_at_once_is_measured_in_service(files):
    """All sources at once, by the default control; the first heads, and the parallel model in the worker."""
    everything = config_of(choose(files, ("everything",))[-1], "tiny")
    assert sources(everything) == {"lookup", "shared_tokens", "lookahead", "draft_model", "heads", "worker"}
    assert everything.target.drafts == "measured"
    assert (everything.target.heads, everything.draft.model) == (files.heads[0], files.parallel)
    without = config_of(choose(DraftFiles(), ("everything",))[-1], "tiny")
    assert sources(without) == {"lookup", "shared_tokens", "lookahead"}


def test_jobs_of_plain_decoding_ask_for_no_drafts(files):
    assert [method.name for method in choose(files, ()) if method.mode == "plain"] == ["plain"]
    assert [method.name for method in choose(files, ()) if method.is_measured] == ["everything"]


# --- prompts ------------------------------------------------------------------------------------------------------


def test_no_prompt_comes_twice():
    prompts = [Prompt(dataset, str(i), (i,)) for dataset in "ab" for i in range(7)]
    found = portions(prompts, 2, 3)
    assert [[(one.dataset, one.id) for one in portion] for portion in found] == [
        [("a", str(i)), ("a", str(i + 1)), ("b", str(i)), ("b", str(i + 1))] for i in (0, 2, 4)
    ]
    assert portions(prompts, 2, 1) == found, "all that there are"
    with pytest.raises(ConfigError, match=r"a has 7 prompts; 2 for .* are 8: lower --limit or --repeats"):
        portions(prompts, 2, 4)


# --- figures ------------------------------------------------------------------------------------------------------


def turn(name, repeat, seconds, texts, stats=None):
    completions = [Completion(text, 1.0, stats or {"rounds": len(text)}) for text in texts]
    return Turn(name, repeat, PROMPTS[: len(texts)], completions, seconds)


def test_accepted_by_depth():
    """Of ten rounds five accepted none, three one and two three: half accepted one or more."""
    assert accepted_by_depth([5, 3, 0, 2]) == [0.5, 0.2, 0.2]
    assert accepted_by_depth([4]) == accepted_by_depth([]) == []


def steps_of(num_steps, **phases_ms):
    return {"num_steps": num_steps, "phases_ms": {"forward": 0.0, "wait": 0.0, "host": 0.0, **phases_ms}}


def test_costs_are_beside_those_of_plain_decoding():
    plain, own = steps_of(10, forward=2.0, host=1.0), steps_of(4, forward=3.0, wait=1.0, host=2.0)
    assert costs_of(own, plain, 0.02) == {"forward_ms": 3.0, "draft_ms": 2.0, "worker_ms": 5.0}
    assert costs_of(plain, plain, None) == {"forward_ms": 2.0, "draft_ms": 0.0, "worker_ms": None}


@pytest.fixture
def measured():
    """Two repetitions of four methods: plain decoding has 4 tokens/s. In the second repetition all are half as fast."""
    stats = {"rounds": 2, "accepted_lengths": [1, 0, 1], "draft_tokens": 4, "accepted_tokens": 2}
    rates = {"plain": 1.0, "lookup": 1.25, "draft-colocated": 2.0, "everything": 1.9}
    turns = [
        turn(name, repeat, slower / rate, [[1, 2], [3, 4]], stats if name != "plain" else None)
        for repeat, slower in enumerate((1.0, 2.0))
        for name, rate in rates.items()
    ]
    steps = {name: steps_of(10, forward=2.0, host=1.0) for name in rates}
    return [ServedMethod(name, name=name) for name in rates], MeasuredMethod(turns, steps, {})


def test_ratios_are_within_a_repetition(measured):
    methods, found = measured
    cells = cells_of(methods, found, 1)
    assert cells["draft-colocated"]["ratio_to"]["plain"]["repeats"] == pytest.approx([2.0, 2.0])
    assert cells["draft-colocated"]["ratio_to"]["lookup"]["median"] == pytest.approx(1.6)
    assert cells["plain"]["ratio_to"]["draft-colocated"]["median"] == pytest.approx(0.5)
    assert cells["draft-colocated"]["tokens_per_round"] == 1.0
    assert cells["draft-colocated"]["accepted_by_depth"] == [0.5, 0.5]
    best, ratio = to_best(found.turns)
    assert (best, ratio["median"]) == ("draft-colocated", pytest.approx(0.95))
    assert to_best([one for one in found.turns if one.contestant != "everything"]) is None


def test_a_text_that_differs_is_found(measured):
    """Also in a later repetition; the table says who differs."""
    methods, found = measured
    wrong = turn("lookup", 1, 1.0, [[1, 2], [3, 5]])
    turns = [wrong if (one.contestant, one.repeat) == ("lookup", 1) else one for one in found.turns]
    cells = cells_of(methods, MeasuredMethod(turns, found.steps, {}), 1)
    assert {name: cell["differing"] for name, cell in cells.items()} == {
        "plain": [],
        "lookup": ["b/1"],
        "draft-colocated": [],
        "everything": [],
    }
    rows = method_table({"T=0": {"methods": cells}})
    assert [row[-1] for row in rows] == ["SAME TEXT", "yes", "NO", "yes", "yes"]


def test_tables_have_a_row_for_each_method(measured):
    methods, found = measured
    results = {at: {"methods": cells_of(methods, found, 1)} for at in ("T=0", "T=0.8")}
    table, by_dataset = method_table(results), dataset_table(results)
    wanted = [(at, method.name) for at in results for method in methods]
    assert [row[:2] for row in table[1:]] == [row[:2] for row in by_dataset[1:]] == wanted
    assert by_dataset[0] == ("", "METHOD", "A", "B")
    assert {len(row) for row in table} == {len(table[0])}
    assert "2.00 (2.00..2.00)" in table[3]


# --- the command --------------------------------------------------------------------------------------------------


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "methods", *map(str, arguments)])


def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path):
    outcome = bench("--target", "tiny", "--limit", 100)
    assert outcome.exit_code == 2
    assert "gsm8k has 100 prompts; 100 for each repetition" in outcome.stderr
    outcome = bench("--target", "tiny", "--methods", "eagle3")
    assert outcome.exit_code == 2
    assert "the method eagle3 needs an EAGLE-3 head (--heads)" in outcome.stderr
    outcome = bench("--target", "tiny", "--bench", tmp_path)
    assert outcome.exit_code == 2
    assert "no file that ends in .jsonl" in outcome.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_methods_in_real_processes(tmp_path):
    """Sampled, several sessions: texts are the same, and all figures of a method are there."""
    prompts = [{"prompt": f"What is {i} times {i + 2}? Explain it in two sentences."} for i in range(4)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    draft = shutil.copytree(resolve_model("tiny", "draft"), tmp_path / "draft")
    out = tmp_path / "report.json"
    arguments = ["--methods", "draft-colocated", "--methods", "lookup", "--draft", draft, "--bench", tmp_path]
    size = ["--limit", 2, "--repeats", 1, "--max-tokens", 16, "--sessions", 2, "--temperature", 0.8]
    outcome = bench("--target", "tiny", *arguments, *size, "--out", out)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(out.read_text())
    cells = found["results"]["T=0.8"]["methods"]
    assert list(cells) == ["plain", "lookup", "draft-colocated"]
    assert {cell["texts"] for cell in cells.values()} == {2}
    assert [cell["differing"] for cell in cells.values()] == [[], [], []]
    plain, draft = cells["plain"], cells["draft-colocated"]
    assert (plain["tokens_per_round"], plain["accepted_by_depth"], plain["weight_bytes"]) == (1.0, [], 0)
    assert draft["tokens_per_round"] > 1
    assert draft["weight_bytes"] == weight_bytes(tmp_path / "draft")
    assert draft["speculation"]["draft_tokens"] > draft["speculation"]["accepted_tokens"] > 0
    assert all(cell["forward_ms"] > 0 for cell in cells.values())
    assert "T=0.8 draft-colocated to plain" in found["figures"]

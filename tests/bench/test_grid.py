"""Strategies and shapes side by side: pairs, variants, cells, tables, and the command over a fake broker."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import deployments, scenario
from bench.scenario import DEFAULT_PAIRS, Completion, Pair, draft_model, parse_pairs
from bench.suites.grids import (
    LOOKUP,
    PLAIN,
    SHAPES,
    GridVariant,
    cells_of,
    same_text,
    shape_table,
    shapes,
    strategies,
    strategy_table,
)
from bench.turns import Turn
from specq.cli import main
from specq.client import Client
from specq.client.parameters import read_parameters
from specq.protocol.errors import ConfigError
from specq.protocol.messages import Submit
from specq.protocol.params import Speculation
from specq.samples import Prompt
from specq.testing.fake_broker import CODEC, FakeBroker
from specq.verification import STRATEGIES

PROMPTS = (Prompt("a", "0", (1,)), Prompt("a", "1", (2,)))
STATS = {"rounds": 4, "draft_tokens": 6, "accepted_tokens": 2, "drafted_rounds": 2, "leaves": 3, "depths": 5}


def turn(name: str, repeat: int, seconds: float, texts: list[list[int]], stats: dict | None = None) -> Turn:
    completions = [Completion(text, 1.0, stats or {"rounds": len(text)}) for text in texts]
    return Turn(name, repeat, PROMPTS[: len(texts)], completions, seconds)


# --- pairs --------------------------------------------------------------------------------------------------------


def test_pairs():
    """Pairs as named, in order; without any, the bundled pair and one with a weak drafter."""
    assert parse_pairs(("a=tiny,weak:0.3", "b=/x=y,/z")) == (Pair("a", "tiny", "weak:0.3"), Pair("b", "/x=y", "/z"))
    assert parse_pairs(()) == DEFAULT_PAIRS
    assert [pair.draft for pair in DEFAULT_PAIRS] == ["tiny", "weak"]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("tiny",), "NAME=TARGET,DRAFT"),
        (("a=tiny",), "NAME=TARGET,DRAFT"),
        (("=tiny,tiny",), "NAME=TARGET,DRAFT"),
        (("a=tiny,weak:much",), "weak:0.15"),
        (("a=tiny,weak:-1",), "weak:0.15"),
        (("a=tiny,weak:nan",), "weak:0.15"),
        (("a=tiny,tiny", "a=tiny,weak"), "two pairs"),
    ],
)
def test_bad_pairs(texts, reason):
    """What is wrong with a pair is said, and what would be right."""
    with pytest.raises(ConfigError, match=reason):
        parse_pairs(texts)


def test_a_draft_model_as_it_is():
    """A bundled name or a directory goes to the draft workers unchanged."""
    with draft_model("/some/where") as model:
        assert model == "/some/where"


@pytest.mark.parametrize("draft", ["random", "weak", "weak:0.5"])
def test_a_draft_model_that_is_made(draft, monkeypatch):
    """What is made is there for the while, with the noise that was asked for."""
    from bench import drafts

    asked = []
    monkeypatch.setattr(drafts, "make_random_draft", lambda model, folder: asked.append((model, folder)))
    monkeypatch.setattr(drafts, "make_weak_draft", lambda model, folder, noise: asked.append((model, folder, noise)))
    with draft_model(draft) as model:
        assert Path(model).is_dir()
    assert not Path(model).exists()
    wanted = {"random": (), "weak": (drafts.WEAK_NOISE,), "weak:0.5": (0.5,)}[draft]
    assert asked == [("tiny", Path(model), *wanted)]


# --- variants -----------------------------------------------------------------------------------------------------


def test_variants():
    """Plain decoding and lookup first, without drafters; every strategy; every shape in both modes; each is a job that
    a client would send."""
    assert [variant.name for variant in strategies()] == ["plain", "lookup", *STRATEGIES]
    assert [variant.name for variant in shapes()] == [
        *("plain", "lookup", *SHAPES, "ssd", "ssd jit", "best-first jit"),
        *(f"{name} sync" for name in SHAPES),
    ]
    for variant in [*strategies(), *shapes()]:
        sent = read_parameters({"temperature": 0.8, **variant.options})
        assert (sent.sampling.strategy, sent.speculation.mode) == (variant.strategy, variant.mode)
    assert len({json.dumps([v.options, v.has_drafters]) for v in shapes()}) == len(shapes())
    assert [v.name for v in [*strategies(), *shapes()] if not v.has_drafters] == ["plain", "lookup"] * 2


def test_whose_text_can_be_compared():
    """Token by token at T = 0, and wherever the draws are those of plain decoding."""
    probabilistic = GridVariant("probabilistic", {"strategy": "probabilistic"})
    assert probabilistic.keeps_text(0)
    assert not probabilistic.keeps_text(0.8)
    assert GridVariant("best-first").keeps_text(0.8)
    assert probabilistic.is_lossless(0.8)
    assert not GridVariant("typical", {"strategy": "typical"}).is_lossless(0.8)


# --- cells --------------------------------------------------------------------------------------------------------


def test_same_text_is_a_share_of_all_completions():
    """Each completion of each repetition is held against plain decoding's first of the same prompt."""
    turns = [
        turn("plain", 0, 1.0, [[1, 2], [3]]),
        turn("plain", 1, 1.0, [[1, 2], [9]]),
        turn("x", 0, 1.0, [[1, 2], [3]]),
        turn("x", 1, 1.0, [[1], [3]]),
    ]
    assert same_text(turns, "x") == 0.75
    assert same_text(turns, "plain") == 0.75


def test_cells():
    """Speed against plain decoding within a repetition, what was verified, and whether the text is the same."""
    variants = [PLAIN, LOOKUP, GridVariant("probabilistic", {"strategy": "probabilistic"})]
    turns = [
        turn("lookup", 0, 4.0, [[1, 2, 3, 4]]),
        turn("lookup", 1, 4.0, [[1, 2, 3, 4]]),
        turn("plain", 0, 2.0, [[1, 2, 3, 4]]),
        turn("probabilistic", 0, 1.0, [[1, 2, 3, 5]], STATS),
        turn("plain", 1, 20.0, [[1, 2, 3, 4]]),
        turn("probabilistic", 1, 10.0, [[1, 2, 3, 5]], STATS),
    ]
    plain, lookup, drafted = cells_of(turns, variants, 0.8)
    assert (plain["ratio_to_lookup"], lookup["ratio_to_plain"], lookup["ratio_to_lookup"]) == (1.1, 2.75, 1.0)
    assert drafted["ratio_to_lookup"] == 2.2
    assert (plain["ratio_to_plain"], plain["same_text"], plain["mean_accepted_length"]) == (1.0, 1.0, 1.0)
    assert (drafted["ratio_to_plain"], drafted["lossless"], drafted["same_text"]) == (2.0, True, None)
    assert (drafted["acceptance_rate"], drafted["nodes_per_round"]) == (0.3333, 1.5)
    assert (drafted["leaves"], drafted["depth"]) == (1.5, 2.5)
    assert cells_of(turns, variants, 0.0)[2]["same_text"] == 0.0


def test_tables():
    """A line for each cell; a dash where nothing was drafted, "in distribution" where texts may differ."""
    turns = [turn("plain", 0, 2.0, [[1, 2]]), turn("typical", 0, 1.0, [[1, 3]], STATS)]
    turns += [turn("probabilistic", 0, 1.0, [[1, 3]], STATS)]
    variants = [PLAIN, *(GridVariant(name, {"strategy": name}) for name in ("typical", "probabilistic"))]
    cells = [{"pair": "p", "temperature": 0.8, **cell} for cell in cells_of(turns, variants, 0.8)]
    header, *rows = strategy_table(cells)
    assert all(len(row) == len(header) for row in rows)
    assert rows[0] == ("p", "0.8", "plain", "yes", "-", "1.00", "1.0", "1.00x", "-", "100%")
    assert rows[1] == ("p", "0.8", "typical", "NO", "33%", "0.50", "2.0", "2.00x", "-", "0%")
    assert rows[2][-1] == "in distribution"
    header, *rows = shape_table(cells)
    assert all(len(row) == len(header) for row in rows)
    assert rows[0][3:8] == ("-", "1.00", "-", "-", "-")
    assert rows[1][3:8] == ("33%", "0.50", "1.50", "1.50", "2.50")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["pair", "--pair", "a=tiny,tiny"], "--pair"),
        (["shapes", "--only", "plain"], "--only"),
        (["shapes", "--random-draft"], "--random-draft"),
        (["strategies", "--model", "tiny"], "--model"),
        (["pair", "--temperature", "-1"], "--temperature"),
        (["strategies", "--pair", "a"], "NAME=TARGET,DRAFT"),
        (["strategies", "--pair", "a=/no/such,tiny"], "/no/such"),
    ],
)
def test_bad_options(options, reason):
    """What cannot be measured, or would be ignored, is said in a line before anything is started."""
    outcome = CliRunner().invoke(main, ["bench", *options, "--out", "x.json"])
    assert outcome.exit_code == 2
    assert reason in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize(("suite", "num_variants"), [("strategies", 7), ("shapes", 15)])
def test_the_command(tmp_path, monkeypatch, suite, num_variants):
    """Every pair, temperature and variant has a line and a cell; jobs ask for what the variant says."""
    served, jobs = [], []

    class Fake:
        def __init__(self, config):
            served.append((config.target.model, config.draft.model, config.up.drafters, config.broker.keys))

        def __enter__(self):
            self.broker = FakeBroker().__enter__()
            self.client = Client(self.broker.address, cache_dir=tmp_path)
            return self

        def wait_ready(self, _timeout_s):
            self.client.wait_until_ready()

        def __exit__(self, *_):
            self.client.close()
            jobs.extend(message for message in self.broker.heard if isinstance(message, Submit))
            self.broker.__exit__()

    path, out = tmp_path / "own.jsonl", tmp_path / "bench.json"
    path.write_text('{"token_ids": [5, 6]}\n' * 2)
    monkeypatch.setattr(deployments, "Servers", Fake)
    monkeypatch.setattr(scenario, "codec_of", lambda _: CODEC)
    pairs = ["--pair", "a=tiny,tiny", "--pair", "b=tiny,/d", "--temperature", "0", "--temperature", "0.5"]
    options = ["--dataset", str(path), "--output-len", "6", "--repeats", "1", "--keys", "k", *pairs, "--out", str(out)]
    outcome = CliRunner().invoke(main, ["bench", suite, *options])
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert len(lines) == 1 + 2 * 2 * num_variants + (suite == "strategies")
    assert served == [("tiny", draft, drafters, "k") for draft in ("tiny", "/d") for drafters in (1, 0)]
    assert {job.params.temperature for job in jobs} == {0.0, 0.5}
    variants = strategies() if suite == "strategies" else shapes()
    asked = {
        (v.strategy, Speculation.from_dict({k: o for k, o in v.options.items() if k != "strategy"})) for v in variants
    }
    assert {(job.params.strategy, job.speculation) for job in jobs} == asked
    report = json.loads(out.read_text())
    result = report["results"]
    assert [(cell["pair"], cell["temperature"]) for cell in result["cells"][::num_variants]] == [
        ("a", 0), ("a", 0.5), ("b", 0), ("b", 0.5),
    ]  # fmt: skip
    assert {cell["same_text"] for cell in result["cells"]} <= {1.0, None}
    assert {"suite", "command", "commit", "machine", "settings"} <= set(report)
    assert {"pairs", "variants", "notes"} <= set(result)
    assert "temperature" not in report["settings"]
    assert len(report["figures"]) == 2 * 2 * num_variants

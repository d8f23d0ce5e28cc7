"""`specq doctor` from one end to the other, with the toy pair."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import free_address
from specq.engines import read_info
from specq.models import resolve_model
from specq.testing.checkpoints_draft import PARALLEL, make_draft
from specq.testing.checkpoints_heads import make_published
from specq.testing.checkpoints_mtp import QWEN, add_mtp
from tests.each import each

ROOT = Path(__file__).parents[2]
METHODS = {"plain", "colocated", "suffix", "lookahead"}


@pytest.fixture
def config(tmp_path):
    """A file that names ports which are free."""
    path = tmp_path / "specq.toml"
    path.write_text(f'[broker]\nbind = "{free_address()}"\n[serve]\nbind = "{free_address()}"\n')
    return path


@pytest.fixture
def ask(config):
    """Run `specq doctor` on a model; return what ended, as it should."""

    def run(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specq", "doctor", "--config", str(config), "--model", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.mark.slow
def test_everything_is_measured_predicted_and_said(ask):
    said = json.loads(ask("tiny", "--sessions", "1", "--sessions", "4", "--json").stdout)
    assert {check["status"] for check in said["checks"]} <= {"ok", "note"}
    runs = {(run["method"], run["num_sessions"]): run for run in said["measured"]["runs"]}
    assert {method for method, _ in runs} == METHODS
    assert all(run["is_same_text"] for run in runs.values())
    assert runs["plain", 1]["tokens_per_round"] == 1.0
    assert runs["colocated", 1]["tokens_per_round"] > 1.5, "the bundled draft model is right more often than not"
    predicted = {(one["method"], one["num_sessions"]): one for one in said["predicted"]}
    workers = {"worker"} if len(os.sched_getaffinity(0)) > 1 else set()
    assert set(predicted) == {(method, count) for method in METHODS | workers for count in (1, 4)}
    assert all(one["tokens_per_second"] > 0 for one in predicted.values())
    is_quiet = next(check["status"] for check in said["checks"] if check["name"] == "quiet") == "ok"
    assert said["advice"][0].startswith(
        "For 1 session at a time" if is_quiet else "The best drafting method is unknown"
    )
    steps = {name: said["measured"][f"step_ms_by_rows{name}"] for name in ("", "_without_help")}
    assert all(steps["_without_help"][rows] >= ms for rows, ms in steps[""].items()), "fewer cores are not faster"


@pytest.mark.slow
def test_a_parallel_draft_model_and_heads_are_predicted(ask, tmp_path):
    """Random ones, which are seldom right; the texts stay the same."""
    tokenizer = read_info(Path(resolve_model("tiny", "target")), "tiny").tokenizer_hash
    shape = replace(PARALLEL, vocab_size=4096, num_tokens=4096, tokenizer_hash=tokenizer)
    draft = make_draft(tmp_path / "draft", shape)
    heads = make_published(tmp_path / "heads", 256, 4096)
    options = ("--draft-model", str(draft), "--heads", str(heads), "--sessions", "1", "--json")
    said = json.loads(ask("tiny", *options).stdout)
    assert {check["name"]: check["status"] for check in said["checks"]}["heads"] == "ok"
    assert all(run["is_same_text"] for run in said["measured"]["runs"])
    assert {*METHODS, "medusa"} <= {one["method"] for one in said["predicted"]}


@pytest.mark.slow
def test_the_tables_say_which_figures_are_measured_and_which_are_not(ask):
    measured, _, predicted = ask("tiny", "--sessions", "2").stdout.partition("\nPREDICTED tokens/s")
    assert "\nMEASURED here, in this process, without sockets" in measured
    assert "computed from the measurements above" in predicted
    assert "2 SESSIONS" in predicted
    assert "specq up --serve --model tiny" in predicted


@pytest.mark.slow
def test_quick_runs_no_measurement(ask):
    done = ask("tiny", "--quick")
    assert "MEASURED" not in done.stdout
    assert "PREDICTED" not in done.stdout
    assert "- Start it: specq up --serve --model tiny" in done.stdout


@each(
    ("arguments", "status", "said"),
    [
        (("--model", "tiny", "--draft-model", resolve_model("smollm2", "draft")), 1, "does not share the tokenizer"),
        (("--model", "/nowhere/model.gguf"), 2, "there is no GGUF file /nowhere/model.gguf"),
        (("--model", "tiny", "--heads", "smollm2"), 1, "hidden states of size 576; those of tiny have 256"),
        (("--model", "tiny", "--heads", resolve_model("tiny", "draft")), 2, "medusa_num_heads is None"),
        (("--model", "tiny", "--heads", "./nothing"), 2, "there is no directory of heads nothing"),
        (("--model", "tiny", "--draft-model", "./nothing"), 2, "there is no model directory"),
        (("--sessions", "0"), 2, "'--sessions'"),
        (("--config", "nowhere.toml"), 2, "nowhere.toml"),
    ],
)
def test_wrong_pairs_end_with_1_and_bad_input_with_2(config, arguments, status, said):
    """Found before anything is measured, so in this process: another would need seconds to import what this one has."""
    done = CliRunner().invoke(main, ["doctor", "--config", str(config), *arguments])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == status, done.output
    assert said in " ".join(done.output.split())
    assert "MEASURED" not in done.stdout
    assert "Traceback" not in done.stderr


def test_an_mtp_layer_that_cannot_be_loaded_is_wrong_only_if_it_was_asked_for(config, tmp_path):
    target = add_mtp(Path(shutil.copytree(resolve_model("tiny", "target"), tmp_path / "tiny")), QWEN, scale=math.nan)
    for heads, status, said in (((), 0, "specq up serves without it"), (("--heads", str(target)), 1, "not finite")):
        asked = ["doctor", "--config", str(config), "--model", str(target), "--quick", *heads]
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == status, done.output
        assert said in " ".join(done.output.split())


def test_a_model_that_cannot_be_unpacked_is_a_finding(config, tmp_path, monkeypatch):
    """As is the cache that cannot be written; all else is looked at, too."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "file"))
    done = CliRunner().invoke(main, ["doctor", "--config", str(config), "--model", "tiny"])
    assert done.exit_code == 1, done.output
    said = " ".join(done.output.split())
    assert f"cannot be unpacked into {tmp_path / 'file'}" in said
    assert "set SPECQ_CACHE to another directory" in said
    assert "MEASURED" not in said


@pytest.mark.slow
def test_weights_that_are_cut_short_are_wrong(ask, tmp_path):
    """Only loading shows it."""
    target = Path(resolve_model("tiny", "target"))
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in target.iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    done = ask(str(broken), "--draft-model", "tiny", status=1)
    assert "loading" in done.stdout
    assert "fetch the model again" in done.stdout
    assert "Traceback" not in done.stderr

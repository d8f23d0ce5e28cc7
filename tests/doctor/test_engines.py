"""The doctor's report on engines: the chosen one, and vLLM beside another one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import Config, TargetConfig, free_address
from specq.doctor import engines
from specq.doctor.advice import Situation, advise
from specq.doctor.checks import NOTE, OK, WRONG
from specq.doctor.engines import VllmReport
from specq.processes.deployment import missing
from tests.each import each

GOOD = VllmReport("0.32.0", "LlamaForCausalLM", num_gpus=2)


OLD = "0.30.0, which was not tested; install a version that was tested (0.26.0 to "


@each(
    ("vllm", "status", "said"),
    [
        (GOOD, OK, "vllm 0.32.0, which was tested with specq"),
        (replace(GOOD, version="0.32.0+cpu", num_gpus=0), OK, "0.32.0+cpu, which was tested"),
        (replace(GOOD, version="0.30.0"), NOTE, OLD),
        (replace(GOOD, num_gpus=0), NOTE, "specq finds no GPU on this machine"),
        (replace(GOOD, lacks_architecture=True), NOTE, "does not list LlamaForCausalLM"),
        (replace(GOOD, num_wanted=2), OK, ""),
        (replace(GOOD, num_wanted=4), WRONG, "tensor_parallel_size is 4; this machine has 2"),
        (replace(GOOD, num_wanted=4, num_gpus=1), WRONG, "this machine has 1"),
    ],
)
def test_the_vllm_that_is_chosen_is_looked_at(vllm, status, said):
    check = engines.chosen_vllm([], vllm)
    assert (check.name, check.status) == ("engine", status)
    assert all(part in f"{check.found} {check.advice}" for part in said.split("; "))
    assert bool(check.advice) == (status != OK)


def test_what_keeps_it_from_starting_stands_before_what_may():
    check = engines.chosen_vllm(["a wrong model", "a package"], VllmReport(""))
    assert (check.status, check.found) == (WRONG, "vllm is not installed; it cannot start")
    assert check.advice.startswith("(1) a wrong model; (2) a package; (3) specq finds no GPU on this machine")


def test_vllm_problems_are_not_errors_for_another_engine():
    assert engines.beside(["a package"], VllmReport("", num_gpus=1)).status == OK
    said = engines.beside(["a package"], VllmReport("", num_gpus=1)).found
    assert said == "not chosen; vllm is not installed; it would need: a package"
    assert engines.beside([], GOOD).found.endswith("tested with specq; --engine vllm starts it")


def test_the_weights_are_divided_among_as_many_devices_as_are_asked_for():
    assert engines.num_devices(Config()) == 1
    for options, expected in (((), 1), (("tensor_parallel_size=4",), 4), (("tensor_parallel_size=x",), 1)):
        target = TargetConfig(engine="vllm", engine_options=options)
        assert engines.num_devices(Config(target=target)) == expected


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Run `specq doctor --quick` on tiny, here, without vLLM or with it."""
    (tmp_path / "own.toml").write_text(f'[broker]\nbind = "{free_address()}"\n[serve]\nbind = "{free_address()}"\n')

    def run(*arguments: str, has_vllm: bool = False):
        monkeypatch.setattr("specq.processes.deployment.find_spec", lambda name: has_vllm or name != "vllm" or None)
        monkeypatch.setattr(engines, "installed_version", lambda: "0.32.0+cpu" if has_vllm else "")
        command = ["doctor", "--config", str(tmp_path / "own.toml"), "--quick", "--json", "--model", "tiny", *arguments]
        done = CliRunner().invoke(main, command)
        said = json.loads(done.stdout)
        return done.exit_code, {check["name"]: check for check in said["checks"]}, said["advice"]

    return run


def test_an_engine_that_cannot_start_is_wrong_as_up_says_it(ask):
    status, checks, advice = ask("--engine", "vllm", "--engine-option", "model=x")
    target = TargetConfig(model="tiny", engine="vllm", engine_options=("model=x",))
    said = missing(Config(target=target))
    assert len(said) == 2
    assert (status, checks["engine"]["status"]) == (1, WRONG)
    assert all(one in checks["engine"]["advice"] for one in said)
    started = "specq up --serve --engine vllm --engine-option model=x --model tiny"
    assert advice[0] == f"Fix the problems above, then start it: {started}"
    assert "vllm engine" not in checks


def test_an_engine_that_can_is_advised_with_its_option(ask):
    status, checks, advice = ask("--engine", "vllm", "--max-model-len", "64", has_vllm=True)
    assert (status, checks["engine"]["status"]) == (0, OK)
    assert advice[0] == "Start it: specq up --serve --engine vllm --engine-option max_model_len=64 --model tiny"


def test_the_engine_that_is_there_anyway_is_named_and_vllm_beside_it(ask):
    status, checks, advice = ask()
    assert (status, checks["engine"]["status"]) == (0, OK)
    assert checks["engine"]["found"].startswith("torch 2")
    assert "it would need: (1) this needs vllm" in checks["vllm engine"]["found"]
    assert advice[0] == "Start it: specq up --serve --model tiny"
    assert ask("--helper-cores", "0")[1]["vllm engine"] == checks["vllm engine"]


@each(
    ("has_vllm", "engine", "said"),
    [
        (False, "torch", "install vllm and start from configs/vllm.toml"),
        (True, "torch", "run specq doctor --engine vllm"),
        (True, "vllm", ""),
    ],
)
def test_on_a_gpu_the_other_engine_is_spoken_of(has_vllm, engine, said):
    here = Situation("", has_draft=True, num_bytes=1, num_cores=8, has_gpu=True, has_vllm=has_vllm, engine=engine)
    found = [one for one in advise(here, []) if "This report is for the torch engine" in one]
    assert len(found) == bool(said)
    assert all(said in one for one in found)


def test_a_gguf_file_is_not_for_it(tmp_path):
    path = tmp_path / "own.gguf"
    path.write_bytes(b"GGUF\x03")
    (check,) = engines.look(Config(target=TargetConfig(model=str(path), engine="vllm")), None, {}, 1)
    assert check.status == WRONG
    assert f"{path} is a GGUF file, which the vllm engine does not support" in check.advice

"""The commands of the first steps: `make broker`, `specq worker --role target`, `specq submit prompts.jsonl`;
and the lines of docs/security.md that set keys up."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specq import Client

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.executable)
PROMPTS = ({"id": "sum", "prompt": "2 + 2 =", "max_tokens": 4}, {"id": "def", "prompt": "def add(", "max_tokens": 8})
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def submitted(program: tuple[str, ...], address: str, tmp_path: Path) -> dict[str, int]:
    """Submit a file of prompts; return by id how many tokens came."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    command = [*program, "submit", str(tmp_path / "prompts.jsonl"), "--broker", address, "--ignore-eos"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    return {result["id"]: len(result["token_ids"]) for result in results}


def test_from_a_clone(spawn, free_address, tmp_path):
    """`make broker` unchanged, except that the environment is not set up again."""
    specq = (str(PYTHON.parent / "specq"),)
    options = f"ARGS=--bind {free_address} --journal none"
    spawn("broker", f"BIN={PYTHON.parent}", options, program=("make", "-C", str(ROOT), "--old-file", ".venv/.ready"))
    spawn("worker", "--role", "target", "--model", "tiny", "--broker", free_address, program=specq)
    assert submitted(specq, free_address, tmp_path) == {"sum": 4, "def": 8}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """What a wheel installs, in a folder of its own."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "specq", source / "specq", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("bench", "workers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([PYTHON, "-c", build, str(folder)], cwd=source, check=True, capture_output=True, timeout=120)
    (made,) = folder.glob("*.whl")
    shutil.unpack_archive(made, folder, "zip")
    made.unlink()
    return folder


def test_a_wheel_has_one_package(wheel):
    assert sorted(path.name for path in wheel.iterdir() if path.suffix != ".dist-info") == ["specq"]


def test_from_a_wheel(wheel, spawn, free_address, tmp_path):
    """In another folder, so that no file comes from the clone. `specq bench` says that it needs one."""
    inside = ("sh", "-c", f'cd "{tmp_path}" && exec env PYTHONPATH="{wheel}" "$@"', "sh", str(PYTHON), "-m", "specq")
    where = [*inside[:-2], "-c", "import specq; print(specq.__file__)"]
    assert subprocess.check_output(where, text=True, timeout=60).strip() == str(wheel / "specq" / "__init__.py")
    spawn("broker", "--bind", free_address, "--journal", "none", program=inside)
    spawn("worker", "--role", "target", "--model", "tiny", "--broker", free_address, program=inside)
    assert submitted(inside, free_address, tmp_path) == {"sum": 4, "def": 8}
    bench = subprocess.run([*inside, "bench", "pair"], capture_output=True, text=True, timeout=60, check=False)
    assert bench.returncode == 2
    assert "specq bench needs a checkout of the repository" in bench.stderr


PAGE = ROOT / "docs" / "security.md"
READY_S = 120


def five_lines() -> list[list[str]]:
    """Return the arguments of `specq` in the page's first block of commands."""
    section = PAGE.read_text("utf-8").split("## Five lines")[1]
    lines = section.split("\n\n")[1].splitlines()
    assert all(line.startswith("    specq ") for line in lines)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_five_lines_set_up_keys(spawn, free_address, tmp_path, monkeypatch):
    """Four keys and `specq up`: a client with a key can submit, one without receives no answer."""
    monkeypatch.chdir(tmp_path)
    *keys, up = five_lines()
    assert len(keys) == 4
    for line in keys:
        subprocess.run([sys.executable, "-m", "specq", *line], check=True, capture_output=True)
    spawn(*up, "--broker", free_address, "--journal", "none", "--drafters", "1", "--model", "tiny")
    with Client(free_address, keys="keys", timeout_s=READY_S) as client:
        client.wait_until_ready(num_drafters=1, timeout_s=READY_S)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2 + 2 =", "max_tokens": 8}\n')
    submit = [sys.executable, "-m", "specq", "submit", "prompts.jsonl", "--broker", free_address, "--timeout-s"]
    with_keys = subprocess.run([*submit, "60", "--keys", "keys"], check=True, capture_output=True, text=True)
    without = subprocess.run([*submit, "2", "--no-wait"], check=False, capture_output=True, text=True)

    assert json.loads(with_keys.stdout)["finish_reason"] in ("length", "stop")
    assert (without.returncode, "no broker answered" in without.stderr) == (1, True)

"""The lines of docs/security.md that set keys up do what the page says."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specq import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
PAGE = Path(__file__).parents[2] / "docs" / "security.md"
READY_S = 120


def five_lines() -> list[list[str]]:
    """Return the arguments of `specq` in the page's first block of commands."""
    section = PAGE.read_text("utf-8").split("## Five lines")[1]
    lines = section.split("\n\n")[1].splitlines()
    assert all(line.startswith("    specq ") for line in lines)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_five_lines_set_up_keys(spawn, free_address, tmp_path, monkeypatch):
    """Four keys and `specq up`: who has a key submits, who has none hears nothing."""
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

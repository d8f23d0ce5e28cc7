"""The Python and the requests by curl that the pages show run as they stand, against a deployment with a gateway."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from specq.config import connect_address, free_address
from tests.deploying import group_of, ready

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "docs/reference/python.md", "docs/http-api.md", "docs/guides/json.md")]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CURL = re.compile(r"^    curl http\S+(?:.*\\\n)*.*$", re.MULTILINE)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Served(NamedTuple):
    broker: str
    gateway: str


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    gateway = free_address()
    serve = {"bind": gateway, "batches": str(tmp_path_factory.mktemp("serve") / "batches")}
    with ready(group_of(up={"serve": True}, broker={"bind": free_address(), "journal": "none"}, serve=serve)) as group:
        yield Served(group.address, connect_address(gateway).removeprefix("tcp://"))


def shown(pattern: re.Pattern[str]) -> list[str]:
    return [block for page in PAGES for block in pattern.findall(page.read_text("utf-8"))]


def here(text: str, served: Served) -> str:
    """Return an example for this deployment instead of the usual one."""
    text = text.replace("tcp://127.0.0.1:5750", served.broker).replace("127.0.0.1:8000", served.gateway)
    return text.replace("smollm2", "tiny")


@pytest.mark.parametrize("code", shown(PYTHON))
def test_python_runs(code: str, served: Served):
    command = [sys.executable, "-c", here(code, served)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, bool(ended.stdout.strip())) == (0, True), ended.stderr


@pytest.mark.parametrize("request_", shown(CURL))
def test_requests_are_answered(request_: str, served: Served):
    command = ["bash", "-c", here(request_, served).strip() + " --silent --show-error --fail-with-body"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, "choices" in ended.stdout) == (0, True), ended.stdout + ended.stderr


def test_there_are_examples():
    assert len(shown(PYTHON)) >= 3
    assert len(shown(CURL)) >= 2

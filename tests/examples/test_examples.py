"""The programs in examples/ run as they stand, against a deployment of the bundled pair."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploying import group_of, ready

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "generate.py": "tokens a round",
    "valid_json.py": "tokens were drafted from the schema",
    "stream_chat.py": "\n",
    "many_prompts.py": "'2 + 2 =': ",
    "same_text.py": "one text: ",
    "draft_shapes.py": "a fixed tree: ",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with ready(group_of(broker={"journal": "none"})) as group:
        yield group.address


def test_each_example_is_tested():
    """Those for Modal are in tests/machines."""
    assert {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("modal_")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_examples_run(broker: str, name: str):
    environment = os.environ | {"SPECQ_BROKER": broker}
    command = [sys.executable, str(EXAMPLES / name)]

    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, SHOWS[name] in ended.stdout) == (0, True), ended.stderr

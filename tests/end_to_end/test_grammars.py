"""Jobs with a grammar through real processes: a verifier and a broker are killed in the middle, and texts stay the
same and valid."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specq import Client
from specq.client import Piece
from specq.testing.waiting import wait_until
from tests.submitting import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATIENCE_S = 60.0
BEATS = ("--heartbeat-ms", "100", "--liveness-ms", "2000")
NUM_ITEMS = 30
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": NUM_ITEMS, "maxItems": NUM_ITEMS}
LONG = {"grammar": {"json_schema": PEOPLE}, "max_tokens": 900, "temperature": 0.8, "seed": 7}
Process = subprocess.Popen[bytes]


class Deployment(NamedTuple):
    address: str
    client: Client
    verifiers: dict[str, Process]
    start_broker: Callable[[], Process]
    broker: list[Process]  # the last one runs

    def holder(self) -> str:
        """Return the name of the verifier that runs the only job, once one does."""
        found: list[str] = []

        def look() -> bool:
            busiest = self.client.status(sessions=1)["sessions"]["busiest"]
            found[:] = [one["verifier"] for one in busiest if one["verifier"]]
            return bool(found)

        wait_until(look, PATIENCE_S)
        return found[0]


@pytest.fixture
def deployment(spawn: Callable[..., Process], free_address: str, tmp_path: Path) -> Iterator[Deployment]:
    """A broker with a journal, and two verifiers of `tiny`."""

    def start_broker() -> Process:
        return spawn("broker", "--bind", free_address, "--journal", str(tmp_path / "journal"), *BEATS)

    broker, target = start_broker(), ("worker", "--role", "target", "--model", "tiny", "--threads", "1")
    verifiers = {name: spawn(*target, "--name", name, "--broker", free_address) for name in ("one", "two")}
    with Client(free_address, timeout_s=PATIENCE_S) as client:
        client.wait_until_ready(num_targets=2, timeout_s=120)
        yield Deployment(free_address, client, verifiers, start_broker, [broker])


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def is_valid(text: str) -> bool:
    people = json.loads(text)
    assert len(people) == NUM_ITEMS
    return all(
        person.keys() == {"name", "age"} and len(person["name"]) <= 12 and 0 <= person["age"] <= 99 for person in people
    )


def test_texts_follow_their_grammars_whatever_is_killed(deployment: Deployment, tmp_path: Path) -> None:
    """From a file of prompts; then a long text whose verifier is killed in the middle, and whose broker is, too."""
    lines: list[dict[str, Any]] = [
        {"prompt": "A person: ", "grammar": {"json_schema": PERSON}, "max_tokens": 120},
        {"prompt": "Yes or no? ", "grammar": {"choice": ["yes", "no"]}},
        {"prompt": "A date: ", "grammar": {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}, "temperature": 0.9, "seed": 3},
        {"prompt": "x", "grammar": {"regex": "("}},
    ]
    outcome, results = run(deployment, tmp_path, "\n".join(map(json.dumps, lines)))
    assert outcome.exit_code == 1
    assert [result["finish_reason"] for result in results] == ["stop", "stop", "stop", "error"]
    assert json.loads(results[0]["text"]).keys() == {"name", "age"}
    assert results[1]["text"] in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", results[2]["text"])
    assert results[3]["error"].startswith("line 4: grammar: invalid regex")

    expected = deployment.client.generate("People: ", **LONG)
    assert expected.finish_reason == "stop"
    assert is_valid(expected.text)

    stream = deployment.client.stream("People: ", **LONG)
    pieces = [next(stream)]
    killed = deployment.verifiers.pop(deployment.holder())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    pieces += list(stream)
    assert text_of(pieces) == expected.text
    assert (pieces[-1].result.finish_reason, pieces[-1].result.token_ids) == ("stop", expected.token_ids)
    assert len(pieces[0].token_ids) < len(expected.token_ids) / 2
    assert deployment.client.status()["counts"]["workers_lost"] == 1

    stream = deployment.client.stream("People: ", **LONG)
    pieces = [next(stream)]
    deployment.broker[-1].kill()
    deployment.broker[-1].wait()
    deployment.broker.append(deployment.start_broker())
    pieces += list(stream)
    assert text_of(pieces) == expected.text
    assert "jobs" not in deployment.client.status()["counts"]  # this broker has the job from the journal

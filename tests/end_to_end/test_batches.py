"""Batches through real processes: OpenAI's own client, `specq submit` of the same lines, kill -9 of each."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing

import openai
import orjson
import pytest

from specq.config.values import free_address
from specq.processes.up import GATEWAY
from specq.testing import wait_until
from specq.transport import listens
from tests.deploying import connected, group_of
from tests.end_to_end.test_gateway import House
from tests.freezing import freeze_between_writes
from tests.submitting import run as submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
URL = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(address: str) -> openai.OpenAI:
    own = openai.DefaultHttpxClient(verify=False)
    url = f"{address.replace('tcp', 'http', 1)}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=5, http_client=own)


def line(name: str, **body) -> bytes:
    return orjson.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body}) + b"\n"


def create(api: openai.OpenAI, lines: list[bytes]):
    file = api.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=URL, completion_window="1h")


def until(api: openai.OpenAI, batch, is_there, patience_s=120.0):
    """Return the batch once it is as wanted."""
    found = []

    def look() -> bool:
        found[:] = [api.batches.retrieve(batch.id)]
        return is_there(found[0])

    wait_until(look, patience_s)
    return found[0]


def has_ended(batch) -> bool:
    return batch.status in ENDED


def content(api: openai.OpenAI, file_id: str | None) -> list[dict]:
    return [orjson.loads(one) for one in api.files.content(file_id).read().splitlines()] if file_id else []


def test_the_official_client_and_submit(tmp_path, own_cache):
    """Create, poll, download, cancel, list, delete; `specq submit` gives the same texts for greedy and seeded lines."""
    bodies = [{"prompt": f"Name {number} colours.", "max_tokens": 12, "temperature": 0.0} for number in range(4)]
    bodies += [{"prompt": "Once", "max_tokens": 12, "temperature": 0.9, "seed": seed} for seed in range(4)]
    group = group_of(up={"serve": True}, serve={"bind": free_address(), "batches": str(tmp_path / "b")})
    address = next(member.about for member in group.members if member.name == GATEWAY)
    with connected(group), client_of(address) as api:
        lines_of_batch = [line(f"a{number}", **body) for number, body in enumerate(bodies)]
        batch = create(api, lines_of_batch)
        batch = until(api, batch, has_ended)
        assert (batch.status, batch.request_counts.completed) == ("completed", len(bodies))
        texts = [one["response"]["body"]["choices"][0]["text"] for one in content(api, batch.output_file_id)]
        for number, data in enumerate(("".join(json.dumps(body) + "\n" for body in bodies), b"".join(lines_of_batch))):
            folder = tmp_path / f"submit-{number}"
            folder.mkdir()
            outcome, lines = submit(group, folder, data)
            assert outcome.exit_code == 0
            assert [one["text"] for one in lines] == texts
        assert len(set(texts[4:])) > 1

        many = create(api, [line(f"b{number}", prompt="x", max_tokens=200) for number in range(3000)])
        until(api, many, lambda one: one.request_counts.completed > 0)
        api.batches.cancel(many.id)
        many = until(api, many, has_ended)
        assert many.status == "cancelled"
        answers, errors = content(api, many.output_file_id), content(api, many.error_file_id)
        assert len(answers) == many.request_counts.completed
        assert {one["custom_id"] for one in (*answers, *errors)} == {f"b{number}" for number in range(3000)}
        assert len(answers) + len(errors) == 3000
        assert [one.id for one in api.batches.list()] == [many.id, batch.id]
        for file in list(api.files.list()):
            assert api.files.delete(file.id).deleted
        assert list(api.files.list()) == []


def num_jobs(folder) -> int:
    with closing(sqlite3.connect(folder / "journal")) as connection:
        return connection.execute("SELECT count(*) FROM jobs").fetchone()[0]


def test_each_process_is_killed_in_the_middle(spawn, tmp_path, own_cache):
    """Every line has one job and one result, with the text of an undisturbed run."""
    house = House(spawn, tmp_path, "--batches", str(tmp_path / "b"))
    seeded = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8}
    bodies = [{"prompt": f"Story {number}", "seed": number, **seeded} for number in range(150)]
    names = [f"c{number}" for number in range(len(bodies))]
    with client_of(house.http) as api:
        batch = create(api, [line(name, **body) for name, body in zip(names, bodies, strict=True)])
        for kill, name in enumerate(("gateway", "broker", "target", "gateway"), 1):
            until(api, batch, lambda one, least=kill * 20: one.request_counts.completed >= least)
            house.kill(name)
            house.start(name)
            wait_until(lambda: house.status("/health") == 200, 60)
        batch = until(api, batch, has_ended, 200)
        assert (batch.status, batch.request_counts.completed) == ("completed", len(bodies))
        answers = content(api, batch.output_file_id)
        assert [one["custom_id"] for one in answers] == names
        assert num_jobs(tmp_path) == len(bodies)
        for number in (0, 70, 149):
            body = dict(bodies[number])
            own = {"ignore_eos": body.pop("ignore_eos")}
            alone = api.completions.create(model="tiny", **body, extra_body=own)
            assert alone.choices[0].text == answers[number]["response"]["body"]["choices"][0]["text"]


def test_a_frozen_gateway(spawn, tmp_path, own_cache):
    """Another one takes its batch over. When it wakes up, it doubles nothing."""
    store = ("--batches", str(tmp_path / "b"))
    house, other = House(spawn, tmp_path, *store), free_address()
    lines = [line(f"d{number}", prompt=f"Story {number}", max_tokens=60, ignore_eos=True) for number in range(100)]
    with client_of(house.http) as frozen, client_of(other) as api:
        batch = create(frozen, lines)
        until(frozen, batch, lambda one: one.request_counts.completed > 0)
        freeze_between_writes(house.processes["gateway"], tmp_path / "b")
        spawn("serve", "--broker", house.broker, "--bind", other, *store)
        wait_until(lambda: listens(other), 60)
        batch = until(api, batch, has_ended)
        before = content(api, batch.output_file_id)
        house.processes["gateway"].send_signal(signal.SIGCONT)
        assert until(frozen, batch, has_ended).status == "completed"
        assert content(frozen, batch.output_file_id) == before
        assert [one["custom_id"] for one in before] == [f"d{number}" for number in range(100)]
        assert num_jobs(tmp_path) == 100

"""`/v1/batches` against a real broker with a journal and a toy model: OpenAI's own client, keys, cancel, conflicts."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import openai
import orjson
import pytest

from specq.client import Client
from specq.gateway import make_key
from specq.testing import ToyEngine, wait_until
from specq.testing.secured import served
from tests.each import each
from tests.gateway.serving import connected, openai_client, running

URL, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "duck eggs", "max_tokens": 8, "temperature": 0}


def line(number, body=None, url=URL) -> dict:
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": BODY if body is None else body}


def jsonl(lines) -> bytes:
    return b"".join(orjson.dumps(one) + b"\n" for one in lines)


FAST = threading.Event()  # while it is not set, each step of the toy takes 10 ms


@pytest.fixture
def is_fast():
    FAST.set()
    yield FAST
    FAST.set()


@contextmanager
def deployed(folder):
    """Yield a broker with a journal and a verifier; batches are looked for often."""
    step = ToyEngine.step

    def delayed(self, steps, *tap):
        FAST.wait(0.01)
        return step(self, steps, *tap)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyEngine, "step", delayed)
        patch.setattr("specq.batches.runner.TICK_S", 0.05)
        patch.setenv("SPECQ_CACHE", str(folder / "cache"))
        with served("", journal=str(folder / "journal")) as one:
            with Client(one.address) as client:
                client.wait_until_ready()
            yield one


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with deployed(tmp_path_factory.mktemp("world")) as one:
        yield one


@pytest.fixture(scope="module")
def gateway(world, tmp_path_factory):
    with running(world.address, batches=str(tmp_path_factory.mktemp("gateway") / "b.batches")) as one:
        yield one


@pytest.fixture
def store(tmp_path):
    """The option of a gateway with a store of its own."""
    return {"batches": str(tmp_path / "b.batches")}


@pytest.fixture
def api(gateway, is_fast):
    with openai_client(gateway) as client:
        yield client


def create(api, lines, endpoint=URL, **options):
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    file = api.files.create(file=("in.jsonl", data), purpose="batch")
    options = {"completion_window": "24h"} | options
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, **options)


def ended(api, batch):
    found = []

    def has_ended():
        found[:] = [api.batches.retrieve(batch.id)]
        return found[0].status in ("completed", "failed", "expired", "cancelled")

    wait_until(has_ended, 60)
    return found[0]


def content(api, file_id) -> list[dict]:
    return [orjson.loads(one) for one in api.files.content(file_id).read().splitlines()] if file_id else []


def counts(world):
    return world.broker.broker.state.counts


def test_a_batch(api, world):
    """As an answer of the endpoint, in the order of the lines; errors have the endpoint's form."""
    seeded = BODY | {"temperature": 1.0, "seed": 7, "prompt": "more eggs"}
    wrong = BODY | {"temperature": 1000}
    batch = create(
        api, [line(1), line(2, seeded), line(3, wrong), line(4, BODY | {"stream": True})], metadata={"a": "b"}
    )
    assert (batch.status, batch.object, batch.endpoint, batch.metadata) == ("validating", "batch", URL, {"a": "b"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(api, batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 2, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at

    answers, errors = content(api, batch.output_file_id), content(api, batch.error_file_id)
    assert [one["custom_id"] for one in answers] == ["id-1", "id-2"]
    assert [one["custom_id"] for one in errors] == ["id-3", "id-4"]
    assert [one["response"]["status_code"] for one in (*answers, *errors)] == [200, 200, 400, 400]
    assert [one["response"]["body"]["error"]["param"] for one in errors] == ["temperature", "stream"]
    for answer, body in zip(answers, (BODY, seeded), strict=True):
        own = api.completions.create(model="", **body)
        assert answer["response"]["body"]["choices"][0]["text"] == own.choices[0].text != ""
        assert answer["response"]["body"]["usage"]["completion_tokens"] == own.usage.completion_tokens
    output = api.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert len({one["id"] for one in (*answers, *errors)}) == 4


@each(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "eggs"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "eggs", "max_output_tokens": 5}),
    ],
)
def test_other_endpoints(api, url, body):
    batch = ended(api, create(api, [line(1, body, url)], url))
    (answer,) = content(api, batch.output_file_id)
    assert answer["response"]["body"]["object"] in ("chat.completion", "response")


def test_sampled_lines_without_a_seed_differ(api):
    """Each line has a seed of its own, which follows from batch and line."""
    body = BODY | {"temperature": 1.0}
    batch = ended(api, create(api, [line(number, body) for number in range(1, 9)]))
    usages = [one["response"]["body"]["usage"]["speculation"] for one in content(api, batch.output_file_id)]
    assert len({usage["choices"][0]["seed"] for usage in usages}) == 8


def test_jobs_have_a_low_priority_and_yield(api, world, is_fast):
    is_fast.clear()
    create(api, [line(number, BODY | {"max_tokens": 200, "ignore_eos": True}) for number in range(1, 6)])
    wait_until(lambda: len(world.broker.broker.state.jobs.active) == 5)
    jobs = [job.request for job in world.broker.broker.state.jobs.active.values()]
    is_fast.set()
    assert {job.priority for job in jobs} == {-100}
    assert {job.submit.label.split(" ")[1] for job in jobs} == {f"{number}/5" for number in range(1, 6)}
    assert all(len(job.submit.digest) == 64 for job in jobs)


def test_a_wrong_file(api):
    lines = [line(1), line(2, url=CHAT), line(1), line(4) | {"method": "GET"}]
    batch = ended(api, create(api, jsonl(lines) + b"{\n"))
    assert batch.status == "failed"
    found = [(one.line, one.code, one.param) for one in batch.errors.data]
    assert found == [
        (2, "invalid_url", "url"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
        (5, "invalid_json_line", None),
    ]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert batch.failed_at >= batch.created_at


@each("data", [b"", b"\n\n\n", b"\x00", b"\xff\xff\n", b"{" * 100_000, b'{"custom_id": "' + b"x" * 2_000_000 + b'"}'])
def test_hostile_files_fail(api, data):
    batch = ended(api, create(api, data))
    assert batch.status == "failed"
    assert len(batch.errors.data) == 1


def test_too_many_lines(api):
    data = jsonl([line(0)]).replace(b"id-0", b"id-%d")
    batch = ended(api, create(api, b"".join(data % number for number in range(50_001))))
    assert [one.code for one in batch.errors.data] == ["too_many_lines"]


def test_cancel(api, world, is_fast):
    """Its jobs stop. Cancelling it again changes nothing."""
    before = counts(world)["finished_cancelled"]
    is_fast.clear()
    body = BODY | {"max_tokens": 200, "ignore_eos": True}
    batch = create(api, [line(number, body) for number in range(1, 101)])
    wait_until(lambda: len(world.broker.broker.state.jobs.active) >= 10)
    assert api.batches.cancel(batch.id).status == "cancelling"
    is_fast.set()
    batch = ended(api, batch)
    assert batch.status == "cancelled"
    assert api.batches.cancel(batch.id).status == "cancelled"
    found = content(api, batch.output_file_id) + content(api, batch.error_file_id)
    assert sorted(one["custom_id"] for one in found) == sorted(f"id-{number}" for number in range(1, 101))
    assert {one["error"]["code"] for one in found if one["error"]} == {"batch_cancelled"}
    wait_until(lambda: not world.broker.broker.state.jobs.active)
    assert counts(world)["finished_cancelled"] > before


def test_a_completed_batch_is_not_cancelled(api):
    batch = ended(api, create(api, [line(1)]))
    with pytest.raises(openai.BadRequestError, match="completed"):
        api.batches.cancel(batch.id)


def test_lists_in_pages(api):
    ids = [create(api, [line(1)]).id for _ in range(3)]
    assert [one.id for one in api.batches.list(limit=2)][:3] == ids[::-1]  # the client fetches the other pages
    assert api.batches.list(limit=2).has_more
    assert [one.id for one in api.batches.list(after=ids[1])][:1] == ids[:1]


def test_the_same_request_again(api):
    """With an `Idempotency-Key` it is the same batch. Without one it is another."""
    first = create(api, [line(1)])
    body = {"input_file_id": first.input_file_id, "endpoint": URL, "completion_window": "1h"}
    keyed = {"extra_headers": {"Idempotency-Key": "k"}}
    ids = {api.batches.create(**body, **keyed).id for _ in range(3)}
    assert len(ids) == 1
    assert first.id not in ids
    with pytest.raises(openai.ConflictError):
        api.batches.create(**body | {"completion_window": "2h"}, **keyed)


def test_files_in_use_stay(api, is_fast):
    is_fast.clear()
    batch = create(api, [line(1, BODY | {"max_tokens": 300, "ignore_eos": True})])
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        api.files.delete(batch.input_file_id)
    is_fast.set()
    ended(api, batch)
    assert api.files.delete(batch.input_file_id).deleted
    assert api.batches.retrieve(batch.id).input_file_id == batch.input_file_id


@each(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": 3}, "endpoint"),
        ({"completion_window": "1w"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10}}, "output_expires_after"),
        ({"more": 1}, "more"),
    ],
)
def test_wrong_bodies(gateway, api, changes, param):
    file = api.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"} | changes
    with connected(gateway) as http:
        response = http.post("/v1/batches", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_a_result_file_begins_no_batch(api):
    batch = ended(api, create(api, [line(1)]))
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.batches.create(input_file_id=batch.output_file_id, endpoint=URL, completion_window="1h")


def test_keys_see_their_own_batches(world, store, tmp_path):
    path = tmp_path / "keys.toml"
    keys = [make_key(path, "alice"), make_key(path, "bob", max_priority=-200)]
    with (
        running(world.address, **store, api_keys=str(path)) as gateway,
        openai_client(gateway, keys[0]) as alice,
        openai_client(gateway, keys[1]) as bob,
    ):
        batch = ended(alice, create(alice, [line(1)]))
        for call in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.files.content(batch.output_file_id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="1h")
        assert list(bob.batches.list()) == []
        assert ended(bob, create(bob, [line(1)])).request_counts.completed == 1


def test_a_gateway_that_stops_in_the_middle(world, store, is_fast):
    """Its jobs run on. The next gateway finds them, so that each line has one job."""
    before = Counter(counts(world))
    is_fast.clear()
    lines = [line(number, BODY | {"max_tokens": 40, "ignore_eos": True}) for number in range(1, 31)]
    with running(world.address, **store) as gateway, openai_client(gateway) as api:
        batch = create(api, lines)
        wait_until(lambda: counts(world)["jobs"] - before["jobs"] >= 16)
    is_fast.set()
    with running(world.address, **store) as gateway, openai_client(gateway) as api:
        batch = ended(api, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert [one["custom_id"] for one in content(api, batch.output_file_id)] == [f"id-{n}" for n in range(1, 31)]
    assert counts(world)["jobs"] - before["jobs"] == 30
    assert counts(world)["finished_cancelled"] == before["finished_cancelled"]

"""What lines of batches ask of the broker: priorities, deadlines, errors that pass and errors that stay."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import orjson
import pytest

from specq.batches import BatchStore
from specq.protocol import Accepted, Cancel, Failed, GetStatus, Status, Submit
from specq.testing import wait_until
from specq.testing.fake_broker import REPORT, answer
from tests.batches.scene import LIMITS
from tests.each import each
from tests.gateway.serving import connected, running

URL = "/v1/completions"


@pytest.fixture(scope="module")
def gateway(_broker, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specq.batches.runner.TICK_S", 0.02)
        patch.setattr("specq.batches.runner.RETRY_S", 0.01)
        patch.setattr("specq.batches.runner.MOST_RETRY_S", 0.05)
        patch.setattr("specq.gateway.batch_lines.MODEL_WAIT_S", 0.1)
        with running(_broker.address, batches=str(tmp_path_factory.mktemp("b") / "b")) as one:
            yield one


def run(gateway, *bodies, window="24h"):
    """Run a batch of completions; return its results in order, answers first."""
    lines = (
        {"custom_id": f"{number}", "method": "POST", "url": URL, "body": {"prompt": "a"} | body}
        for number, body in enumerate(bodies)
    )
    data = "\n".join(map(json.dumps, lines)).encode()
    with connected(gateway) as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", data)}).json()
        asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": window}
        batch = http.post("/v1/batches", json=asked).json()
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda: http.get(path).json()["status"] in ("completed", "failed", "expired"), 30)
        batch = http.get(path).json()
        assert batch["status"] == "completed", batch
        files = [one for one in (batch["output_file_id"], batch["error_file_id"]) if one]
        texts = [http.get(f"/v1/files/{one}/content").content for one in files]
        return [orjson.loads(one) for text in texts for one in text.splitlines()]


def test_cancelled_while_its_gateway_is_dead(broker, tmp_path, monkeypatch):
    """The next gateway stops the jobs that it left running."""
    monkeypatch.setattr("specq.batches.runner.TICK_S", 0.02)
    data = json.dumps({"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "a", "n": 2}}).encode()
    asked = {"endpoint": URL, "completion_window": "24h"}
    broker.reply = lambda message: [Accepted(job_id=message.job_id)] if isinstance(message, Submit) else answer(message)
    with running(broker.address, batches=str(tmp_path / "b")) as one, connected(one) as http:
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", data)}).json()
        batch = http.post("/v1/batches", json=asked | {"input_file_id": file["id"]}).json()
        wait_until(lambda: len(submits(broker)) == 2, 30)
    assert not broker.num_heard(Cancel)
    store = BatchStore(tmp_path / "b", LIMITS)
    asyncio.run(store.write(lambda tables: tables.cancel_batch("", batch["id"])))
    store.close()
    with running(broker.address, batches=str(tmp_path / "b")) as other, connected(other) as http:
        path = f"/v1/batches/{batch['id']}"
        wait_until(lambda: http.get(path).json()["status"] == "cancelled", 30)
        wait_until(lambda: broker.num_heard(Cancel) >= 2, 30)
    stopped = {message.job_id for message in broker.heard if isinstance(message, Cancel)}
    assert stopped == {job.job_id for job in submits(broker)}


def submits(broker) -> list[Submit]:
    return [message for message in broker.heard if isinstance(message, Submit)]


def test_priorities_and_deadlines(gateway, broker):
    """A line's own priority counts if it is lower, and its own deadline."""
    run(gateway, {}, {"priority": -500}, {"priority": 7}, {"deadline": 5})
    jobs = submits(broker)
    assert sorted(job.priority for job in jobs) == [-500, -100, -100, -100]
    assert min(job.deadline_ms // 1000 for job in jobs) == 5
    assert all(86_000 < job.deadline_ms / 1000 < 86_500 for job in jobs if job.deadline_ms > 5000)
    assert {job.tenant for job in jobs} == {""}


@each("code", ["busy", "no_verifier"])
def test_what_passes_is_tried_again(gateway, broker, code):
    """With the same job."""
    tried = Counter[int]()

    def refusing(message):
        if isinstance(message, Submit):
            tried[message.job_id] += 1
            if tried[message.job_id] < 3:
                return [Failed(job_id=message.job_id, code=code, reason="not now")]
        return answer(message)

    broker.reply = refusing
    found = run(gateway, {}, {})
    assert [one["response"]["status_code"] for one in found] == [200, 200]
    assert list(tried.values()) == [3, 3]


@each(("code", "status"), [("engine", 500), ("invalid", 400), ("deadline", 504)])
def test_what_stays_is_the_result_of_the_line(gateway, broker, code, status):
    def failing(message):
        if isinstance(message, Submit) and message.priority == -500:
            return [Failed(job_id=message.job_id, code=code, reason="it failed")]
        return answer(message)

    broker.reply = failing
    right, wrong = run(gateway, {}, {"priority": -500})
    assert right["response"]["status_code"] == 200
    assert wrong["response"]["status_code"] == status
    assert wrong["response"]["body"]["error"]["message"] == "it failed"


def test_a_model_that_is_not_served(gateway, broker):
    """It may register late; after a while its lines fail."""
    (wrong,) = run(gateway, {"model": "other"})
    assert wrong["response"]["status_code"] == 404
    assert wrong["response"]["body"]["error"]["code"] == "model_not_found"


def test_a_model_that_registers_late(gateway, broker, monkeypatch):
    monkeypatch.setattr("specq.gateway.batch_lines.MODEL_WAIT_S", 20.0)
    asked = []

    def late(message):
        if isinstance(message, GetStatus):
            asked.append(1)
            return [Status(report=REPORT | {"models": ["fake", "late"] if len(asked) > 1 else ["fake"]})]
        return answer(message)

    broker.reply = late
    (found,) = run(gateway, {"model": "late"})
    assert found["response"]["status_code"] == 200


@each(
    ("body", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"stream": True}, "stream"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1001}, "priority"),
        ({"priority": 10**30}, None),
        ({"model": ["fake"]}, "model"),
        ({"nonsense": 1}, "nonsense"),
        ({"logit_bias": {"x": "y"}}, "logit_bias"),
    ],
)
def test_hostile_bodies_fail_alone(gateway, broker, body, param):
    right, wrong = run(gateway, {}, body)
    assert right["custom_id"] == "0"
    assert 400 <= wrong["response"]["status_code"] < 500, wrong
    if param is not None:
        assert wrong["response"]["body"]["error"]["param"] == param

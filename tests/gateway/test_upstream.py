"""A gateway outlives its verifiers: when another model takes a name's place, its tokenizer is fetched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specq.client import link
from specq.gateway.serving import REPORT_S
from specq.protocol import FetchTokenizer, GetStatus, Moved, Status, Submit
from specq.testing import tokenizer_files, wait_until
from specq.testing.fake_broker import ANSWER, INFO, FakeBroker, answer
from specq.text import tokenizer_chunks
from tests.gateway.serving import connected, running


class House:
    """Answers as a broker whose verifier has a model that changes."""

    def __init__(self) -> None:
        self.info = INFO

    def __call__(self, message):
        if isinstance(message, GetStatus):
            worker = {
                "role": "target",
                "state": "ready",
                "model": self.info.name,
                "tokenizer": self.info.tokenizer_hash,
            }
            return [Status(report={"models": [self.info.name], "workers": [worker]})]
        if isinstance(message, FetchTokenizer):
            return list(tokenizer_chunks(self.info, tokenizer_files()))
        return answer(message)


@pytest.mark.parametrize("change", [{"name": "other"}, {"tokenizer_hash": "1" * 64}])
def test_another_model_in_the_place_of_one(broker, own_cache, change):
    broker.reply = house = House()
    with running(broker.address) as gateway, connected(gateway) as http:

        def model():
            return http.post("/v1/completions", json={"prompt": "a"}).json()["model"]

        assert model() == "fake"
        assert broker.num_heard(FetchTokenizer) == 1
        house.info = replace(INFO, **change)
        wait_until(lambda: model() == house.info.name and broker.num_heard(FetchTokenizer) == 2, 10 * REPORT_S)
        assert model() == house.info.name
        assert broker.num_heard(FetchTokenizer) == 2


def test_several_brokers(broker, own_cache, monkeypatch, free_address):
    """The gateway leaves a broker that does not answer, and follows a job to where it is."""
    monkeypatch.setattr(link, "_DRAWN", 0)

    def reply(message):
        return [Moved(job_id=message.job_id, address=third.address)] if isinstance(message, Submit) else answer(message)

    broker.reply = reply
    with (
        FakeBroker() as third,
        running(f"{free_address},{broker.address}", timeout_s=2.0) as gateway,
        connected(gateway) as http,
    ):
        found = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 100}).json()
        assert found["choices"][0]["text"] == ANSWER
        assert http.get("/health").status_code == 200
    assert (broker.num_heard(Submit), third.num_heard(Submit)) == (1, 1)

"""`specq doctor --broker`: a running deployment's texts and rates with drafts and without."""

import json

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.client import Result
from specq.doctor import examine_service
from specq.doctor.serving import MAX_TOKENS, ServedRates
from specq.protocol import Submit
from specq.samples import shipped_messages
from specq.testing.fake_broker import REPORT, FakeBroker


class Deployment:
    """Says one text, and another with drafts at the temperatures of `wrong`; its two best tokens are `gap` apart."""

    def __init__(self, wrong=(), gap=1.0):
        self.wrong, self.gap, self.asked = wrong, gap, []

    def generate(self, **arguments):
        self.asked.append(arguments)
        is_other = "mode" not in arguments and arguments.get("temperature") in self.wrong
        token_ids = [5, 6, 8 if is_other else 7]
        logprobs = [{"token_id": token, "top": [[token, -0.1], [9, -0.1 - self.gap]]} for token in token_ids]
        return Result("1", "", token_ids=token_ids, logprobs=logprobs)


def ask(deployment):
    return examine_service(deployment, 2, lambda _: None)


def test_both_ways_take_turns_on_the_same_prompts_and_seeds():
    deployment = Deployment()
    found = ask(deployment)
    assert (found.texts, found.differing, found.check.status, found.is_sound) == (8, {}, "ok", True)
    warming, asked = deployment.asked[:4], deployment.asked[4:]
    assert {one["max_tokens"] for one in warming} == {1}
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert all({**one, "mode": ""} == {**other, "mode": ""} for one, other in pairs)
    assert ["mode" in one for one, _ in pairs] == [False, True] * 4
    assert {one["temperature"] for one in asked} == {0.0, 0.8}
    assert found.to_dict()["ratio"] > 0


@pytest.mark.parametrize(
    ("wrong", "gap", "status"), [((0.0,), 1.0, "wrong"), ((0.0,), 0.01, "note"), ((0.8,), 1.0, "note")]
)
def test_a_text_that_drafts_change_is_named_and_wrong_unless_it_may_be_a_near_tie(wrong, gap, status):
    found = ask(Deployment(wrong, gap))
    assert found.check.status == status
    assert list(found.differing) == [f"{name} T={wrong[0]:g}" for name, _ in shipped_messages(2)]
    assert next(iter(found.differing)) in found.lines()[-1]


def test_a_ratio_is_of_two_turns():
    """A deployment that becomes four times as slow changes none."""
    assert ServedRates(2, {}, {"plain": [100.0, 25.0], "drafts": [200.0, 50.0]}).ratio == 2.0


def test_the_command_asks_the_broker_that_is_named(monkeypatch):
    short = [("gsm8k/1", [{"role": "user", "content": "2 + 2?"}])]
    monkeypatch.setattr("specq.doctor.serving.shipped_messages", lambda _: short)
    drafts = {"role": "draft", "name": "d", "registered_s_ago": 10.0, "drafts_for": {"v": 2}, "metrics": {}}
    monkeypatch.setitem(REPORT, "workers", [*REPORT["workers"], drafts])
    with FakeBroker() as broker:
        outcome = CliRunner().invoke(main, ["doctor", "--broker", broker.address, "--json"])
        told = CliRunner().invoke(main, ["doctor", "--broker", broker.address]).stdout
        heard = [message for message in broker.heard if isinstance(message, Submit)]
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    assert found["differing"] == {}
    assert [check["status"] for check in found["drafting"]] == ["ok"]
    assert told.splitlines()[-1].startswith("drafting: ok: d drafts for v: 2 jobs")
    assert {message.params.max_tokens for message in heard} == {1, MAX_TOKENS}
    assert {message.speculation.mode for message in heard} == {"plain", "async"}

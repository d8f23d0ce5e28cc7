"""`specq trace` over real processes: a broker, verifiers and a drafter, on one machine, whose monotonic clock they
share."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from specq import Client
from specq.cli import main
from specq.processes.up import Group
from tests.deploying import connected, group_of, ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MOST_RUNS = 20  # until drafts came in time: the machine may be busy
PROMPT = "def add(a, b):"


def start(traced_jobs: int, targets: int = 1) -> Group:
    return group_of(
        up={"drafters": 1, "targets": targets},
        broker={"journal": "none", "traced_jobs": traced_jobs},
        target={"drafts": "always"},
        draft={"model": "tiny"},
    )


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with ready(start(0)) as running:
        yield running


def traced(address: str, *options: str) -> dict:
    done = CliRunner().invoke(main, ["trace", "--json", "--broker", address, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def of(trace: dict, process: str, *events: str) -> list[dict]:
    return [one for one in trace["events"] if one["process"] == process and (not events or one["event"] in events)]


def test_a_job_that_asks_is_followed_through_all_processes(group):
    """Rounds, tokens and drafts add up to what the result says, and the text is what it is without a trace."""
    with Client(group.address) as client:
        for run in range(MOST_RUNS):  # another prompt each time, so that none of it is known
            prompt = f"{run}. {PROMPT}"
            result = client.generate(prompt, max_tokens=48, ignore_eos=True, trace=True)
            if result.stats["draft_tokens"]:
                break
        trace = traced(group.address)
        plain = client.generate(prompt, max_tokens=48, ignore_eos=True)

    rounds = of(trace, "target-1", "round")
    judged = of(trace, "target-1", "judged")
    assert result.token_ids == plain.token_ids
    assert (sum(one["tokens"] for one in rounds), len(rounds)) == (48, result.stats["rounds"])
    assert sum(one["accepted"] for one in judged) == result.stats["accepted_tokens"]
    assert sum(one["verified"] for one in judged) == result.stats["draft_tokens"] > 0
    assert sum(one["tokens"] for one in of(trace, "broker", "verdict")) == 48
    assert next(one["event"] for one in of(trace, "broker")) == "submitted"
    assert next(one["event"] for one in of(trace, "target-1")) == "opened"
    assert of(trace, "target-1", "prefill")[0]["tokens"] > 1
    assert {"assigned", "draft_sent", "verdict_arrived", "released"} <= {one["event"] for one in of(trace, "draft-1")}
    assert {"submitted", "received", "ended"} <= {one["event"] for one in of(trace, "client")}
    assert all(part["is_complete"] for part in trace["processes"])


def test_clocks_are_aligned_within_what_is_stated(group):
    """Here all clocks are one, so the true offset is 0: a message is never received before it was sent by more than the
    errors that are stated."""
    with Client(group.address) as client:
        client.generate(PROMPT, max_tokens=64, ignore_eos=True, trace=True)
    trace = traced(group.address)

    error_us = {part["name"]: part["error_us"] for part in trace["processes"]}
    assert all(0 < one < 5_000_000 for one in error_us.values())
    handed = next(one for one in of(trace, "broker", "opened"))
    opened = next(one for one in of(trace, "target-1", "opened"))
    assert opened["at_us"] >= handed["at_us"] - error_us["target-1"]
    for verdict, done in zip(of(trace, "broker", "verdict"), of(trace, "target-1", "round"), strict=True):
        assert verdict["at_us"] >= done["at_us"] - error_us["target-1"]
    submitted, taken = of(trace, "client", "submitted")[0], of(trace, "broker", "submitted")[0]
    assert taken["at_us"] >= submitted["at_us"] - error_us["client"]


def test_a_job_that_did_not_ask_has_the_brokers_milestones(group):
    with Client(group.address) as client:
        client.generate(PROMPT, max_tokens=16, ignore_eos=True)
    trace = traced(group.address)
    text = CliRunner().invoke(main, ["trace", "--broker", group.address]).stdout

    assert {one["process"] for one in trace["events"]} == {"broker"}
    assert not trace["in_all_processes"]
    assert "only the broker's milestones" in text
    assert "finished (length) with 16 tokens" in text


def test_what_is_printed_for_people_and_for_perfetto(group):
    with Client(group.address) as client:
        client.generate(f"# {PROMPT}", max_tokens=16, ignore_eos=True, trace=True)  # a prompt that is not known yet
    job = traced(group.address)["job"]
    text = CliRunner().invoke(main, ["trace", str(job), "--broker", group.address]).stdout
    spans = json.loads(CliRunner().invoke(main, ["trace", str(job), "--chrome", "--broker", group.address]).stdout)

    assert "ended: length" in text
    assert "forward" in text
    assert {"round", "forward", "prefill"} <= {one["name"] for one in spans["traceEvents"]}
    unknown = CliRunner().invoke(main, ["trace", "12345", "--broker", group.address])
    assert (unknown.exit_code, "there is no trace of job 12345" in unknown.stderr) == (1, True)


def test_a_verifier_that_dies_is_in_the_trace():
    """The next one goes on, and what the first had sent by then stays. No job asked: the broker's option traces it."""
    group = start(traced_jobs=1, targets=2)
    with connected(group) as client:
        stream = client.stream(PROMPT, max_tokens=1500, ignore_eos=True)
        for _ in range(100):
            next(stream)
        (holder,) = [one["verifier"] for one in client.status(sessions=1)["sessions"]["busiest"]]
        group.processes[holder].send_signal(signal.SIGKILL)
        assert [piece.text for piece in stream]
        trace = traced(group.address)

    story = [one["event"] for one in of(trace, "broker", "opened", "crashed", "left", "finished")]
    assert story[0] == "opened"
    assert story[-1] == "finished"
    assert {"crashed", "left"} & set(story)
    assert story.count("opened") >= 2
    assert next(part["is_lost"] for part in trace["processes"] if part["name"] == holder)
    others = {one["process"] for one in trace["events"] if one["event"] == "round"} - {holder}
    assert others

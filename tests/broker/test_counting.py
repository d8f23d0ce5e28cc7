"""What the broker counts of rounds, and shows of what workers count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.broker import Broker
from specq.broker.jobs.reports import MOST_METRICS, MOST_PAIRS, status_report
from specq.protocol import LEAST_OWN_LANE
from specq.protocol.bounds import REPORT
from specq.protocol.messages import Heartbeat
from specq.protocol.stats import COUNTED_DEPTHS, MOST_ENTRIES
from tests.broker.desk import VERIFIER, Desk, desk_with
from tests.broker.test_steps import step_of


def verdict(desk: Desk, tokens: list[int], mask: list[int], **fields: Any) -> None:
    """Send a verdict of job 1 on some nodes. Nodes with a 1 were accepted."""
    desk.verdict(1, *tokens, node_ids=np.arange(len(mask)), mask=np.array(mask), **fields)


def rounds(desk: Desk) -> dict[str, Any]:
    return status_report(desk.broker.state)["rounds"]["toy"]


def test_rounds_are_counted_by_model() -> None:
    """`accepted_lengths` and `drafted_rounds` leave plain rounds out, as vLLM's counters do."""
    desk = desk_with(1)
    verdict(desk, [7], [])
    verdict(desk, [8, 9, 3], [1, 0, 1, 0])
    verdict(desk, [4], [0, 0])
    found = rounds(desk)
    assert found.pop("accepted_lengths") == [1, 0, 1] + [0] * (COUNTED_DEPTHS - 2)
    nodes = {"drafted_rounds": 2, "draft_tokens": 6, "accepted_tokens": 2}
    assert found == {"rounds": 3, "tokens": 5, "prompt_tokens": 2, **nodes}


def test_what_is_counted_of_a_round() -> None:
    """A verdict that comes twice counts once; one that accepts more than is counted counts with the last; and all of
    that outlives its job."""
    desk = Desk()
    desk.submit(1, max_tokens=100)
    for _ in range(3):
        verdict(desk, [8, 9], [1], base_len=2)
    assert (rounds(desk)["rounds"], rounds(desk)["tokens"], rounds(desk)["prompt_tokens"]) == (1, 2, 2)
    verdict(desk, list(range(60)), [1] * 59)
    assert (rounds(desk)["accepted_lengths"][-1], rounds(desk)["accepted_tokens"]) == (1, 60)
    desk.verdict(1, 5, finish="stop")
    assert rounds(desk)["rounds"] == 3


OWN_LANE = LEAST_OWN_LANE + 3


@pytest.mark.parametrize("way", ["alone", "alone, lanes", "in a step"])
def test_accepted_tokens_are_counted_for_the_draft_worker_and_the_verifier(way: str) -> None:
    """Of two lanes. Nodes that were not accepted, of the verifier's own sources and of lanes that are gone add nothing;
    nor does a verdict that comes twice."""
    desk = Desk(drafters_per_job=2)
    desk.add_drafter(b"ann")
    desk.add_drafter(b"ben")
    desk.submit(1, max_tokens=100)
    ann, ben = (desk.job(1).drafters.lane_of(name) for name in (b"ann", b"ben"))
    numbers = {id(lane): number for number, lane in desk.job(1).drafters.lanes.items()}
    first, second = numbers[id(ann)], numbers[id(ben)]
    lanes = [first, first, second, OWN_LANE, first, 200] if way != "alone" else [second] * 6
    mask = [1, 1, 1, 1, 0, 1]
    for _ in range(2):
        if way == "in a step":
            said = {"num_nodes": [6], "node_ids": range(6), "mask": mask, "node_lanes": lanes, "base_lens": [2]}
            desk.back(step_of(desk, (1, [7, 8, 9, 4, 3]), **said))
        else:
            own = {} if way == "alone" else {"node_lanes": np.array(lanes)}
            verdict(desk, [7, 8, 9, 4, 3], mask, base_len=2, seen=(second, 5), **own)
    found = {worker["name"]: worker for worker in status_report(desk.broker.state)["workers"]}
    counts = {name: found[name]["metrics"].get("accepted_for", {}) for name in ("ann", "ben", "v")}
    assert counts == {"ann": {} if way == "alone" else {"v": 2}, "ben": {"v": 5 if way == "alone" else 1}, "v": {}}
    assert [found[name].get("drafts_for") for name in ("ann", "ben", "v")] == [{"v": 1}, {"v": 1}, None]
    assert rounds(desk)["accepted_tokens"] == 5
    desk.leave()
    found = {worker["name"]: worker for worker in status_report(desk.broker.state)["workers"]}
    assert found["ben"]["metrics"] == {}
    assert "drafts_for" not in found["ben"]


def test_a_draft_worker_cannot_claim_accepted_tokens() -> None:
    desk = Desk()
    desk.add_drafter(b"ann")
    for claimed in ({"v": 10**9}, 7):
        desk.front(b"ann", Heartbeat(incarnation=1, state="ready", metrics={"accepted_for": claimed, "drafts": 3}))
        assert status_report(desk.broker.state)["workers"][1]["metrics"] == {"drafts": 3}


def credited(desk: Desk) -> dict[str, Any]:
    return desk.broker.state.workers.get(b"ann").accepted_for


def test_accepted_tokens_of_a_name_stay_until_its_last_verifier_leaves() -> None:
    """So counts only grow while a verifier of that name is there. Names of thousands that come and go are not kept."""
    desk = Desk()
    desk.hello(b"other", name="v")
    desk.add_drafter(b"ann")
    credited(desk)["v"] = 5
    desk.leave(b"other")
    assert credited(desk) == {"v": 5}
    desk.leave()
    assert credited(desk) == {}


def test_a_report_has_room_for_who_drafts_for_whom() -> None:
    desk = Desk()
    desk.add_drafter(b"ann")
    credited(desk).update({f"v{i}": i for i in range(5000)})
    found = status_report(desk.broker.state)["workers"][1]["metrics"]["accepted_for"]
    assert found == {f"v{i}": i for i in range(5000 - MOST_PAIRS, 5000)}


@pytest.mark.parametrize("seen", [(), (-1, 3), (LEAST_OWN_LANE, 1), (2**31 - 1, 1)])
def test_nodes_of_no_lane_of_a_draft_worker_count_for_nobody(seen: tuple[int, ...]) -> None:
    desk = Desk()
    desk.add_drafter(b"ann")
    desk.submit(1, max_tokens=100)
    verdict(desk, [7, 8], [1], seen=seen)
    (found,) = (worker for worker in status_report(desk.broker.state)["workers"] if worker["name"] == "ann")
    assert (found["metrics"], rounds(desk)["accepted_tokens"]) == ({}, 1)


def test_lanes_that_do_not_fit_the_nodes_are_refused() -> None:
    desk = desk_with(1)
    verdict(desk, [7, 8], [1, 0], node_lanes=np.array([0]))
    assert desk.broker.state.counts["dropped_back"] == 1
    assert desk.job(1).transcript.num_tokens == 0


def test_jobs_are_counted_by_model_and_whether_they_run() -> None:
    desk = Desk(max_sessions=2)
    for number in (1, 2, 3):
        desk.submit(number)
    assert status_report(desk.broker.state)["loads"] == {"toy": {"waiting": 1, "running": 2}}


def test_what_a_worker_counts_is_shown_as_it_was_last() -> None:
    desk = Desk()
    for stale in (3, 5):
        desk.front(VERIFIER, Heartbeat(incarnation=1, state="ready", metrics={"stale": stale}))
    (worker,) = status_report(desk.broker.state)["workers"]
    assert worker["metrics"] == {"stale": 5}


@pytest.mark.parametrize("num_workers", [MOST_METRICS - 1, pytest.param(4095, marks=pytest.mark.slow)])
def test_a_report_has_room_for_what_the_workers_count(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many workers there are, and however much they say."""
    monkeypatch.setattr(Broker, "validates", False)  # it looks at each worker after each message
    desk = Desk()
    metrics = {str(i): [0] for i in range(MOST_ENTRIES // 2)}
    for number in range(num_workers):
        identity = b"w%d" % number
        desk.hello(identity)
        desk.front(identity, Heartbeat(incarnation=1, state="ready", metrics=metrics))
    report = status_report(desk.broker.state)
    shown = [worker for worker in report["workers"] if worker.get("metrics")]
    assert len(shown) == min(num_workers, MOST_METRICS - 1)  # and the desk's own
    assert REPORT.admits(report)

"""Where the time of a verifier's steps went, between two of its reports."""

import pytest

from bench.step_split import StepSplit, split
from specq.protocol import EngineError

BEFORE = {"step_us": {"forward": [9000, 1, 2], "host": [500, 1]}}
AFTER = {"step_us": {"wait": [2000, 0, 4], "plan": [400, 4], "forward": [49_000, 1, 5, 1], "host": [3300, 2]}}


def test_phases_are_means_of_the_steps_between_two_reports():
    """Four more steps; what a report leaves out is 0."""
    phases = {"wait": 0.5, "plan": 0.1, "forward": 10.0, "judge": 0.0, "host": 0.7}
    assert split(BEFORE, AFTER) == {"num_steps": 4, "phases_ms": phases, "host_ms": 1.3, "wait_ms": 0.5}
    assert split(AFTER, AFTER)["host_ms"] == 0.0


class Reports:
    """A client whose broker knows the steps of one verifier; the last report is given again and again."""

    def __init__(self, *workers):
        self._workers = list(workers)

    def status(self):
        worker = self._workers.pop(0) if len(self._workers) > 1 else self._workers[0]
        return {"workers": [{"role": "draft", "steps": 0}, {"role": "target", "name": "t", **worker}]}


def test_a_report_counts_when_the_verifier_has_beaten_since_its_last_step():
    """What the broker knows right after the last job is older than the job's last steps."""
    idle = {"steps": 3, "metrics": BEFORE}
    late, done = {"steps": 5, "metrics": BEFORE}, {"steps": 7, "metrics": AFTER | {"choices": {"suffix": [1, 5]}}}
    found = StepSplit(Reports(idle, idle, late, done), heartbeat_ms=0)
    found.begin()
    figures = found.figures()
    assert (figures["num_steps"], figures["choices"]) == (4, {"suffix": [1, 5]})


def test_a_verifier_that_goes_on_by_itself_is_an_error():
    busy = ({"steps": i, "metrics": {}} for i in range(100))
    with pytest.raises(EngineError, match="t does not come to rest"):
        StepSplit(Reports(*busy), heartbeat_ms=0).begin()

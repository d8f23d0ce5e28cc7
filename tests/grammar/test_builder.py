"""The builder: grammars tried in a process that may hang, die or fill its memory, while others are served."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from specq.grammar import builder as builder_module
from specq.grammar.builder import GrammarBuilder
from specq.grammar.limits import Limits
from specq.grammar.trial_process import TrialProcess, Verdict
from specq.models import resolve_model
from specq.protocol.grammars import grammar_text
from specq.text import load_tokenizer_files
from tests.grammar.hostile import HOSTILE

FILES = load_tokenizer_files(resolve_model("tiny", "target"))
MODEL = (FILES, 4096, (0,))
PATIENCE_S = 30
LIMITS = Limits(trial_s=PATIENCE_S, mask_s=0.1)  # a busy machine's
OBJECT, NUMBER = grammar_text({"json_object": True}), grammar_text({"regex": "[0-9]{1,9}"})


class Waiting:
    """A builder, and what it finished."""

    def __init__(self, limits=LIMITS):
        self.builder = GrammarBuilder(*MODEL, limits)
        self._woken = queue.SimpleQueue()
        self.builder.on_ready = lambda: self._woken.put(None)
        self.found = {}
        self.order = []

    def wait(self, *keys):
        """Return (matcher, reason) of each job."""
        until = time.monotonic() + PATIENCE_S
        while not set(keys) <= self.found.keys():
            self._woken.get(timeout=until - time.monotonic())
            for key, matcher, reason in self.builder.ready():
                assert key not in self.found
                assert (matcher is None) == bool(reason)
                self.found[key] = matcher, reason
                self.order.append(key)
        return [self.found[key] for key in keys]

    def build(self, key, grammar):
        self.builder.begin(key, grammar)
        return self.wait(key)[0]

    @property
    def pid(self):
        return self.builder._trials.pid


@pytest.fixture
def waiting():
    started = []

    def start(limits=LIMITS):
        started.append(Waiting(limits))
        return started[-1]

    yield start
    for one in started:
        one.builder.close()


@pytest.fixture(scope="module")
def shared():
    one = Waiting(replace(LIMITS, mask_s=0.02, trial_bytes=64 << 20))
    yield one
    one.builder.close()


def has_ended(pid, patience_s=PATIENCE_S):
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], patience_s)[0])
    finally:
        os.close(watched)


def test_jobs_get_matchers_of_their_own(waiting):
    one = waiting()
    for key in range(3):
        one.builder.begin(key, NUMBER)
    matchers = [matcher for matcher, _ in one.wait(0, 1, 2)]
    assert len({id(matcher) for matcher in matchers}) == 3
    matchers[0].consume_tokens(one.builder.tokenizer().ids("12"))
    assert matchers[1].compute_bitmask() == matchers[2].compute_bitmask() != matchers[0].compute_bitmask()


def test_a_grammar_is_tried_once(waiting, monkeypatch):
    one, tried = waiting(), []
    real = TrialProcess.tried
    monkeypatch.setattr(TrialProcess, "tried", lambda self, grammar: (tried.append(grammar), real(self, grammar))[1])
    for key in range(5):
        one.builder.begin(key, NUMBER)
    one.wait(*range(5))
    one.build(5, NUMBER)
    refused = grammar_text({"json_schema": {"enum": []}})
    assert one.build(6, refused) == one.build(7, refused)
    assert tried == [NUMBER, refused]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_harms_no_other(shared, name):
    value, _ = HOSTILE[name]
    hostile, key = grammar_text(value), 10 * list(HOSTILE).index(name)
    neighbour = grammar_text({"regex": f"[a-z]{{{1 + key}}}"})  # a new one, so it needs a trial too
    began = time.monotonic()
    shared.builder.begin(key, hostile)
    shared.builder.begin(key + 1, neighbour)
    shared.builder.begin(key + 2, NUMBER)
    (_, reason), (matcher, _), (other, _) = shared.wait(key, key + 1, key + 2)
    assert matcher is not None
    assert other is not None
    assert time.monotonic() - began < PATIENCE_S
    if "masks slowly" in name:
        assert "takes" in reason or "64 MB" in reason


def test_a_grammar_that_is_known_does_not_wait_for_a_trial(waiting):
    one = waiting()
    one.build(0, NUMBER)
    os.kill(one.pid, signal.SIGSTOP)
    one.builder.begin(1, OBJECT)
    one.builder.begin(2, NUMBER)
    one.wait(2)
    assert 1 not in one.found
    os.kill(one.pid, signal.SIGCONT)
    assert one.wait(1)[0][0] is not None


def test_a_trial_that_takes_too_long_is_ended_and_the_next_grammar_is_served(waiting):
    one = waiting(replace(LIMITS, trial_s=0.2))
    one.build(0, NUMBER)
    pid = one.pid
    os.kill(pid, signal.SIGSTOP)
    assert one.build(1, OBJECT) == (None, "grammar: its trial took more than 0.2 s")
    assert has_ended(pid)
    one.builder._trials._limits = LIMITS
    assert one.build(2, OBJECT)[0] is not None, "only the machine was slow, so it is tried again"


def test_a_process_of_trials_that_is_killed_harms_no_job(waiting):
    one = waiting()
    one.build(0, NUMBER)
    first = one.pid
    os.kill(first, signal.SIGSTOP)
    one.builder.begin(1, OBJECT)
    os.kill(first, signal.SIGKILL)  # in the middle of a trial
    assert one.wait(1)[0][0] is not None
    second = one.pid
    os.kill(second, signal.SIGKILL)  # between two
    assert has_ended(second)
    assert one.build(2, grammar_text({"regex": "a+"}))[0] is not None
    assert len({first, second, one.pid}) == 3


def test_a_grammar_whose_trials_are_killed_is_refused():
    trials = TrialProcess(*MODEL, LIMITS)
    trials._tried_once = lambda _grammar: None
    assert trials.tried(OBJECT) == Verdict("grammar: its trial was killed", is_final=False)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(-signal.SIGABRT, "more than 64 MB"), (-signal.SIGSEGV, "nests too deeply"), (3, "ended with status 3")],
)
def test_the_end_of_a_trial_says_why(status, reason):
    verdict = TrialProcess(*MODEL, replace(LIMITS, trial_bytes=64 << 20))._verdict_of_end(status)
    assert reason in verdict.reason
    assert verdict.is_final == (status < 0)


def test_memory_is_limited_to_what_one_grammar_may_use():
    limits = replace(LIMITS, mask_s=PATIENCE_S, trial_bytes=32 << 20)
    trials = TrialProcess(*MODEL, limits)
    try:
        assert trials.tried(grammar_text({"regex": "(ab){1000000}"})) == Verdict(limits.memory_reason)
        for i in range(20):  # what one has used is not counted against the next
            assert trials.tried(grammar_text({"regex": f"[a-z]{{{i + 1},900}}"})) == Verdict("")
    finally:
        trials.close()
        trials.reap()


def test_cancelled_jobs_are_not_returned(waiting):
    one = waiting()
    one.build(0, NUMBER)
    os.kill(one.pid, signal.SIGSTOP)
    for key in (1, 2, 3):
        one.builder.begin(key, OBJECT)
    one.builder.cancel(1)
    one.builder.begin(4, NUMBER)
    one.wait(4)
    one.builder.cancel(4)
    os.kill(one.pid, signal.SIGCONT)
    one.wait(2, 3)
    assert one.order == [0, 4, 2, 3]


def test_waiting_jobs_are_limited(waiting, monkeypatch):
    monkeypatch.setattr(builder_module, "MOST_WAITING", 2)
    one = waiting()
    one.build(0, NUMBER)
    os.kill(one.pid, signal.SIGSTOP)
    for key in (1, 2, 3):
        one.builder.begin(key, OBJECT)
    assert one.wait(3) == [(None, "grammar: 2 others are waiting to be built; try again")]
    os.kill(one.pid, signal.SIGCONT)
    assert all(matcher is not None for matcher, _ in one.wait(1, 2))


def test_verdicts_are_limited(waiting, monkeypatch):
    monkeypatch.setattr(builder_module, "MOST_VERDICTS", 2)
    one = waiting()
    for key in range(4):
        one.build(key, grammar_text({"regex": f"a{{{key + 1}}}"}))
    assert len(one.builder._verdicts) == 2


def test_without_a_grammar_no_process_and_no_tokenizer_are_loaded(waiting):
    one = waiting()
    assert one.builder.ready() == []
    assert (one.pid, one.builder._tokenizer, one.builder._threads) == (None, None, [])


def test_closing_ends_the_process_and_the_threads_in_the_middle_of_a_trial(waiting):
    one = waiting()
    one.build(0, NUMBER)
    pid = one.pid
    os.kill(pid, signal.SIGSTOP)
    one.builder.begin(1, OBJECT)
    one.builder.close()
    assert has_ended(pid)
    assert not any(thread.is_alive() for thread in one.builder._threads)


def test_a_process_without_llguidance_says_so(waiting, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    one = waiting()
    assert "need the package llguidance" in one.builder.prepare()
    matcher, reason = one.build(0, OBJECT)
    assert matcher is None
    assert "need the package llguidance" in reason
    assert one.pid is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the process ends at the end of its pipe")
def test_the_process_of_trials_ends_with_a_verifier_that_is_killed(spawn):
    script = textwrap.dedent("""
        import os, signal, sys
        from specq.models import resolve_model
        from specq.text import load_tokenizer_files
        from specq.grammar.limits import Limits
        from specq.grammar.trial_process import TrialProcess
        trials = TrialProcess(load_tokenizer_files(resolve_model("tiny", "target")), 4096, (0,), Limits(trial_s=60))
        assert trials.tried('{"json_object":true}').reason == ""
        os.kill(trials.pid, signal.SIGSTOP)  # it cannot read the end of its pipe
        print(trials.pid, flush=True)
        signal.pause()
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.communicate()
    assert has_ended(pid)

"""The builder: grammars tried in a process that may hang, die or fill its memory, while others are served."""

from __future__ import annotations

import itertools
import os
import queue
import re
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
from specq.grammar.building import Walk, follow
from specq.grammar.limits import GrammarLimits
from specq.grammar.trial_process import TrialProcess, TrialVerdict
from specq.models import resolve_model
from specq.protocol import JobError
from specq.protocol.grammars import grammar_text
from specq.text import load_tokenizer_files
from tests.grammar.hostile import HOSTILE

FILES = load_tokenizer_files(resolve_model("tiny", "target"))
MODEL = (FILES, 4096, (0,))
PATIENCE_S = 60
LIMITS = GrammarLimits(trial_s=PATIENCE_S, mask_s=0.1)  # a busy machine's
OBJECT, NUMBER = grammar_text({"json_object": True}), grammar_text({"regex": "[0-9]{1,9}"})


KEYS = itertools.count()


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

    def begin(self, *grammars, owner=""):
        """Begin a job for each grammar; return their keys."""
        keys = list(itertools.islice(KEYS, len(grammars)))
        for key, grammar in zip(keys, grammars, strict=True):
            self.builder.begin(key, grammar, owner)
        return keys

    def build(self, grammar):
        return self.wait(*self.begin(grammar))[0]

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
    one = Waiting(replace(LIMITS, trial_s=5, mask_s=0.02, trial_bytes=32 << 20))
    yield one
    one.builder.close()


@pytest.fixture
def paused(shared):
    """The shared builder, whose process of trials is stopped until the test continues it."""
    shared.build(NUMBER)
    os.kill(shared.pid, signal.SIGSTOP)
    yield shared
    os.kill(shared.pid, signal.SIGCONT)


def new():
    """Return a grammar that was not tried yet."""
    return grammar_text({"regex": f"[a-z]{{{1 + next(KEYS)}}}"})


def has_ended(pid, patience_s=PATIENCE_S):
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], patience_s)[0])
    finally:
        os.close(watched)


def test_jobs_get_matchers_of_their_own(shared):
    matchers = [matcher for matcher, _ in shared.wait(*shared.begin(NUMBER, NUMBER, NUMBER))]
    assert len({id(matcher) for matcher in matchers}) == 3
    matchers[0].consume_tokens(shared.builder.tokenizer().ids("12"))
    assert matchers[1].compute_bitmask() == matchers[2].compute_bitmask() != matchers[0].compute_bitmask()


def test_a_text_at_the_limit_of_states_ends_no_other_job(shared, monkeypatch):
    monkeypatch.setattr(shared.builder, "_limits", replace(LIMITS, lexer_states=300))
    grammar = grammar_text({"json_schema": {"type": "string", "maxLength": 2000}})
    (first, _), (second, _) = shared.wait(*shared.begin(grammar, grammar))
    with pytest.raises(JobError, match="too many states"):
        follow(first, Walk((), (), 0, 500))
    second.compute_bitmask()
    assert not second.is_error()


def test_a_grammar_is_tried_once(shared, monkeypatch):
    tried, one, refused = [], new(), grammar_text({"json_schema": {"enum": []}})
    real = TrialProcess.tried
    monkeypatch.setattr(TrialProcess, "tried", lambda self, grammar: (tried.append(grammar), real(self, grammar))[1])
    shared.wait(*shared.begin(*[one] * 5))
    shared.build(one)
    assert shared.build(refused) == shared.build(refused)
    assert tried == [one, refused]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_harms_no_other(shared, name):
    began = time.monotonic()
    keys = shared.begin(grammar_text(HOSTILE[name][0]), new(), NUMBER)
    (_, reason), (neighbour, _), (known, _) = shared.wait(*keys)
    assert neighbour is not None
    assert known is not None
    assert time.monotonic() - began < PATIENCE_S
    if "masks slowly" in name:
        assert re.search("takes|32 MB|took more than 5 s", reason)


def test_a_grammar_that_is_known_does_not_wait_for_a_trial(paused):
    unknown, known = paused.begin(new(), NUMBER)
    paused.wait(known)
    assert unknown not in paused.found
    os.kill(paused.pid, signal.SIGCONT)
    assert paused.wait(unknown)[0][0] is not None


def test_owners_take_turns_with_trials(paused):
    """However many grammars one of them has."""
    many = paused.begin(*(new() for _ in range(4)), owner="many")
    (one,) = paused.begin(new(), owner="one")
    os.kill(paused.pid, signal.SIGCONT)
    paused.wait(*many, one)
    assert paused.order[-5:] == [many[0], one, *many[1:]]


def test_a_trial_that_takes_too_long_is_ended_and_the_next_grammar_is_served(paused, monkeypatch):
    pid, one = paused.pid, new()
    monkeypatch.setattr(paused.builder._trials, "_limits", replace(LIMITS, trial_s=0.2))
    assert paused.build(one) == (None, "grammar: its trial took more than 0.2 s")
    assert has_ended(pid)
    monkeypatch.undo()
    assert paused.build(one)[0] is not None, "only the machine was slow, so it is tried again"


@pytest.mark.slow
def test_a_process_of_trials_that_is_killed_harms_no_job(paused):
    first, in_the_middle = paused.pid, paused.begin(new())
    os.kill(first, signal.SIGKILL)
    assert paused.wait(*in_the_middle)[0][0] is not None
    second = paused.pid
    os.kill(second, signal.SIGKILL)  # between two
    assert has_ended(second)
    assert paused.build(new())[0] is not None
    assert len({first, second, paused.pid}) == 3


def test_a_grammar_whose_trials_are_killed_is_refused():
    trials = TrialProcess(*MODEL, LIMITS)
    trials._tried_once = lambda _grammar: None
    assert trials.tried(OBJECT) == TrialVerdict("grammar: its trial was killed", is_final=False)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(-signal.SIGABRT, "more than 64 MB"), (-signal.SIGSEGV, "nests too deeply"), (3, "ended with status 3")],
)
def test_the_end_of_a_trial_says_why(status, reason):
    verdict = TrialProcess(*MODEL, replace(LIMITS, trial_bytes=64 << 20))._verdict_of_end(status)
    assert reason in verdict.reason
    assert verdict.is_final == (status < 0)


@pytest.mark.slow
def test_memory_is_limited_to_what_one_grammar_may_use():
    limits = replace(LIMITS, mask_s=PATIENCE_S, trial_bytes=32 << 20)
    trials = TrialProcess(*MODEL, limits)
    try:
        assert trials.tried(grammar_text({"regex": "(ab){1000000}"})) == TrialVerdict(limits.memory_reason)
        for i in range(20):  # what one has used is not counted against the next
            assert trials.tried(grammar_text({"regex": f"[a-z]{{{i + 1},900}}"})) == TrialVerdict("")
    finally:
        trials.close()
        trials.reap()


def test_cancelled_jobs_are_not_returned(paused):
    one = new()
    cancelled, *kept = paused.begin(one, one, one)
    paused.builder.cancel(cancelled)
    ended = paused.begin(NUMBER)
    paused.wait(*ended)
    paused.builder.cancel(*ended)
    os.kill(paused.pid, signal.SIGCONT)
    paused.wait(*kept)
    assert paused.order[-3:] == [*ended, *kept]


def test_a_key_that_comes_back_gets_its_newest_grammar(paused):
    (key,) = paused.begin(new())
    paused.builder.cancel(key)
    paused.builder.begin(key, NUMBER)
    matcher, _ = paused.wait(key)[0]
    assert matcher.try_consume_tokens(paused.builder.tokenizer().ids("12")) > 0
    os.kill(paused.pid, signal.SIGCONT)
    paused.build(new())
    assert paused.order.count(key) == 1


def test_waiting_jobs_are_limited(paused, monkeypatch):
    monkeypatch.setattr(builder_module, "MOST_WAITING", 2)
    *taken, refused = paused.begin(new(), new(), new())
    assert paused.wait(refused) == [(None, "grammar: 2 others are waiting to be built; try again")]
    os.kill(paused.pid, signal.SIGCONT)
    assert all(matcher is not None for matcher, _ in paused.wait(*taken))


def test_verdicts_are_limited(shared, monkeypatch):
    monkeypatch.setattr(builder_module, "MOST_VERDICTS", 5)
    shared.builder._verdicts.clear()
    shared.wait(*shared.begin(*[new() for _ in range(8)]))
    assert len(shared.builder._verdicts) == 5


def test_without_a_grammar_no_process_and_no_tokenizer_are_loaded(waiting):
    one = waiting()
    assert one.builder.ready() == []
    assert (one.pid, one.builder._tokenizer, one.builder._threads) == (None, None, [])


def test_closing_ends_the_process_and_the_threads_in_the_middle_of_a_trial(waiting):
    one = waiting()
    one.build(NUMBER)
    pid = one.pid
    os.kill(pid, signal.SIGSTOP)
    one.begin(OBJECT)
    one.builder.close()
    assert has_ended(pid)
    assert not any(thread.is_alive() for thread in one.builder._threads)


def test_a_process_without_llguidance_says_so(waiting, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    one = waiting()
    assert "need the package llguidance" in one.builder.prepare()
    matcher, reason = one.build(OBJECT)
    assert matcher is None
    assert "need the package llguidance" in reason
    assert one.pid is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the process ends at the end of its pipe")
def test_the_process_of_trials_ends_with_a_verifier_that_is_killed():
    script = textwrap.dedent("""
        import os, signal, sys
        from specq.models import resolve_model
        from specq.text import load_tokenizer_files
        from specq.grammar.limits import GrammarLimits
        from specq.grammar.trial_process import TrialProcess
        files = load_tokenizer_files(resolve_model("tiny", "target"))
        trials = TrialProcess(files, 4096, (0,), GrammarLimits(trial_s=60))
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

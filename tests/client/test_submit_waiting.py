"""`specq submit` while it runs: progress, interrupts, and the wait for a broker and a verifier."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from specq.cli.waiting import WaitReport
from specq.protocol.messages import Cancel, Failed, FetchTokenizer, Submit
from specq.testing.fake_broker import ANSWER, FakeBroker, answer
from specq.testing.waiting import wait_until
from tests.each import each
from tests.submitting import GOOD, run

pytestmark = pytest.mark.usefixtures("own_cache")


def test_interrupted(tmp_path, spawn):
    """Ctrl-C ends the command at once, with what is done written, and stops the jobs that run."""

    def reply(message):
        slow = isinstance(message, Submit) and message.params.max_tokens == 9
        return [] if slow or isinstance(message, Cancel) else answer(message)

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(GOOD + '{"prompt": "a", "max_tokens": 9}\n' * 3)
    with FakeBroker(reply) as broker:
        process = spawn("submit", str(prompts), "--out", str(out), "--broker", broker.address)
        broker.wait_for(Submit, 4)
        while not out.exists() or not out.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
        assert len({message.job_id for message in broker.wait_for(Cancel, 3)}) == 3
    assert json.loads(out.read_text())["text"] == ANSWER


def test_progress_bar(broker, tmp_path):
    """On a terminal a bar counts the prompts, however many completions they have."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD * 3)
    master, slave = pty.openpty()
    arguments = ["submit", str(prompts), "--out", str(tmp_path / "out.jsonl"), "--broker", broker.address, "--n", "2"]
    done = subprocess.run([sys.executable, "-m", "specq", *arguments], stderr=slave, check=False, timeout=60)
    os.close(slave)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert done.returncode == 0
    assert "prompts" in shown
    assert "3/3" in shown
    assert "6/3" not in shown


@each("gone", [True, False])
def test_without_a_broker_or_verifier_the_error_says_what_to_start(tmp_path, gone):
    """No broker, or no verifier: one line that says what to start, exit status 1, earlier results untouched."""
    (tmp_path / "results.jsonl").write_text("")
    reply = [Failed(job_id=0, code="no_verifier", reason="no verifier is registered")]
    with FakeBroker(lambda _: [] if gone else reply) as broker:
        outcome, _ = run(broker, tmp_path, GOOD, "--timeout-s", "0.3", "--no-wait")
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1
    assert ("make broker" if gone else "no verifier") in outcome.stderr


NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="no verifier is registered")


def test_a_verifier_is_waited_for(tmp_path):
    """It is said on standard error what for; when it is there, the run goes on."""
    questions = []

    def reply(message):
        if isinstance(message, FetchTokenizer) and len(questions) < 2:
            questions.append(message)
            return [NO_VERIFIER]
        return answer(message)

    with FakeBroker(reply) as broker:
        outcome, results = run(broker, tmp_path, GOOD, "--timeout-s", "2")
    assert (outcome.exit_code, [result["text"] for result in results]) == (0, [ANSWER])
    waits, goes_on, _ = outcome.stderr.splitlines()
    assert f"waiting for a verifier to register with the broker at {broker.address}, at most 600 s" in waits
    assert "fake is served, after" in goes_on


def test_a_broker_is_waited_for(tmp_path, free_address, spawn):
    """One that is started after the command."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(GOOD)
    process = spawn("submit", str(prompts), "--out", str(out), "--broker", free_address, "--timeout-s", "2")
    while f"waiting for a broker at {free_address}" not in process.output.read_text():
        assert process.poll() is None
    with FakeBroker(endpoint=free_address):
        assert process.wait(60) == 0
    assert json.loads(out.read_text())["text"] == ANSWER


def test_what_is_waited_for_is_said_again_and_again(capsys):
    """Until the wait is over: with a model, or without."""
    report = WaitReport(600.0, every_s=0.001)
    report("a broker at tcp://127.0.0.1:9")
    said = ""

    def is_repeated() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return said.count("still waiting for a broker at tcp://127.0.0.1:9: 0 of 600 s") >= 2

    wait_until(is_repeated, 20)
    report.is_served("tiny")
    said = capsys.readouterr().err
    assert said.count("tiny is served") == 1
    assert "waiting for" not in said.partition("tiny is served")[2]


def test_the_wait_is_bounded(tmp_path):
    """After it, the reason, and exit status 1."""
    with FakeBroker(lambda _: [NO_VERIFIER]) as broker:
        outcome, _ = run(broker, tmp_path, GOOD, "--timeout-s", "0.2", "--wait-seconds", "0.3")
    assert outcome.exit_code == 1
    assert "at most 0.3 s" in outcome.stderr
    assert "no verifier is registered" in outcome.stderr.splitlines()[-1]


def test_ctrl_c_while_waiting_is_quiet(tmp_path, spawn):
    """One line said what was waited for, and no more is said."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD)
    with FakeBroker(lambda _: [NO_VERIFIER]) as broker:
        process = spawn("submit", str(prompts), "--broker", broker.address)
        while "waiting for" not in process.output.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    assert process.output.read_text().count("\n") == 1

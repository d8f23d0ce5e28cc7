"""`specq chat`: it starts its own processes if none run, and stops them at the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from specq.protocol import Failed, FetchTokenizer, GetStatus, Message, Status, Submit
from specq.testing.fake_broker import CODEC, FakeBroker, answer
from specq.testing.waiting import wait_until
from tests.each import each
from tests.end_to_end.terminal import PATIENCE_S, Terminal

SPECQ = (sys.executable, "-m", "specq")
TINY = ("chat", "--model", "tiny", "--max-tokens", "12")


def chat(*arguments: str, text: bool = True, **options: Any) -> subprocess.CompletedProcess:
    """Run `specq chat`. If it takes too long, the failure shows the stacks of its threads."""
    given = options.pop("input", None)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    options = {"text": text, "env": os.environ | {"PYTHONFAULTHANDLER": "1"}} | pipes | options
    with subprocess.Popen([*SPECQ, "chat", *arguments], **options) as process:
        try:
            told = process.communicate(given, PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            pytest.fail(f"it does not end: {process.communicate()}")
    return subprocess.CompletedProcess(process.args, process.returncode, *told)


def test_a_named_broker_starts_no_processes(free_address):
    done = chat("--broker", free_address, "--no-wait", "--timeout-s", "0.2", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no broker answered at {free_address}" in done.stderr
    assert "starting" not in done.stderr


def _asked_of(broker: FakeBroker) -> str:
    """Return the prompt of the only job."""
    (job,) = broker.wait_for(Submit)
    return CODEC.decode(job.prompt_ids, skip_special=False)


def test_what_is_piped_in_is_part_of_the_question(broker, own_cache):
    """At its end, without a word that asks for it."""
    done = chat("--broker", broker.address, "Sum this up:", input="eggs\n")
    assert done.returncode == 0, done.stderr
    assert "Sum this up: eggs" in _asked_of(broker)


@pytest.mark.slow
def test_an_open_pipe_without_a_writer_is_not_waited_for(broker, own_cache):
    """As test runners leave it to what they start: the question is asked, and what was not read is said."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as ours, os.fdopen(write_end, "wb"):
        done = chat("--broker", broker.address, "What is it?", stdin=ours)
    assert done.returncode == 0, done.stderr
    assert "received no standard input within 5 s; continuing without it" in done.stderr
    assert "What is it?" in _asked_of(broker)


class OtherModels:
    """What a broker answers that serves other models than the one that is asked for, until `is_served`."""

    def __init__(self, *served: str) -> None:
        self.served, self.is_served = served, False

    def __call__(self, message: Message) -> Sequence[Message]:
        if isinstance(message, GetStatus):
            return [Status(report={"models": list(self.served)})]
        if isinstance(message, FetchTokenizer) and not self.is_served:
            return [Failed(job_id=0, code="no_verifier", reason=f"served are {', '.join(self.served)}")]
        return answer(message)


@each(("asked", "hint"), [("smolm2", "; did you mean 'smollm2'?"), ("nothing-alike", "")])
def test_a_name_that_no_verifier_could_have_is_refused_at_once(spawn, asked, hint):
    """Though `--wait-seconds` is 600 by default."""
    with FakeBroker(OtherModels("smollm2")) as broker:
        process = spawn("chat", "--broker", broker.address, "--model", asked, "hi")
        assert process.wait(PATIENCE_S) == 2
    said = f"specq: the broker at {broker.address} does not serve the model {asked!r}; served models: smollm2{hint}\n"
    assert process.output.read_text() == said


def test_while_a_known_model_is_waited_for_it_is_said_what_is_served(spawn):
    models = OtherModels("smollm2")
    with FakeBroker(models) as broker:
        process = spawn("chat", "--broker", broker.address, "--model", "tiny", "hi")
        waits = (
            f"specq: waiting for a verifier of model 'tiny' to register with the broker at {broker.address} "
            "(served models: smollm2), at most 600 s (--no-wait: fail instead)\n"
        )
        wait_until(lambda: waits in process.output.read_text(), PATIENCE_S)
        models.is_served = True
        process.wait(PATIENCE_S)
    assert process.output.read_text().count("waiting for") == 1
    assert "is served, after" in process.output.read_text()


def test_who_does_not_want_to_wait_reads_what_is_served(spawn):
    with FakeBroker(OtherModels("smollm2")) as broker:
        process = spawn("chat", "--broker", broker.address, "--model", "tiny", "--no-wait", "hi")
        assert process.wait(PATIENCE_S) == 1
    assert process.output.read_text() == "specq: served are smollm2\n"


def test_an_empty_question_is_refused():
    done = chat(input=" \n")
    assert done.returncode == 2
    assert "the question is empty" in done.stderr


@each("encoding", ["ascii", "utf-8"])
def test_a_question_in_another_encoding_is_refused(encoding):
    done = chat(input=b"sch\xf6n\n", text=False, env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"})
    assert done.returncode == 2
    assert f"standard input is not valid {encoding}" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.slow
def test_one_question_from_a_pipe():
    """The answer alone goes to standard output; beside it stands what is done before there is one. All processes have
    ended."""
    done = chat(*TINY[1:], "Say", "-", input="hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert "«" not in done.stdout
    assert "specq: starting tiny" in done.stderr
    assert "\ntarget-1: loading tiny\n" in done.stderr
    assert re.search(r"^target-1: ready after \d+\.\d s$", done.stderr, re.MULTILINE)
    assert "target-1" not in done.stdout
    assert re.search(r"\d+ tokens in \d+ rounds, .*, \d+ tokens/s", done.stderr)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    done = chat("--model", str(tmp_path / "cut.gguf"), "hello")
    assert done.returncode == 1
    assert "cut.gguf is not a GGUF file: it has 5 bytes" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_conversation_in_a_terminal():
    """Marks instead of colours for NO_COLOR; Ctrl-C stops an answer, Ctrl-D ends the chat."""
    with Terminal(*TINY, NO_COLOR="1") as terminal:
        assert "«corrected by the target»" in terminal.wait_for("> ")
        terminal.send("hello\r")
        assert "\x1b[3" not in terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.send("/mode plain\r/max 4000\r/nonsense\r")
        terminal.wait_for("unknown command /nonsense; known: /help")
        terminal.wait_for("> ")
        while True:  # until Ctrl-C comes before the end of an answer, which may be short
            terminal.send("1 2 3 4 5 6 7 8 9 10 11 12\r")
            terminal.wait_for("\u2039")  # the first token is the target's own
            terminal.send("\x03")
            if "(stopped)" in terminal.wait_for("> "):
                break
            # the answer had ended: what is typed before Ctrl-C has come would be lost
            terminal.wait_for("ends the chat")
            terminal.wait_for("> ")
        terminal.send("\x04")
        assert terminal.wait() == 0

"""`specq chat`: it brings its own processes where there are none, and takes them with it."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Self

import pytest

from specq.protocol import Failed, FetchTokenizer, GetStatus, Message, Status, Submit
from specq.testing.fake_broker import CODEC, FakeBroker, answer
from specq.testing.waiting import wait_until

SPECQ = (sys.executable, "-m", "specq")
TINY = ("chat", "--model", "tiny", "--max-tokens", "12")
PATIENCE_S, HANG_UP_S = 60, 10  # the first less than a test may take


def test_with_a_broker_named_nothing_is_started(free_address):
    command = [*SPECQ, "chat", "--broker", free_address, "--no-wait", "--timeout-s", "0.2", "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no broker answered at {free_address}" in done.stderr
    assert "starting" not in done.stderr


def _asked_of(broker: FakeBroker) -> str:
    """Return the prompt of the only job."""
    (job,) = broker.wait_for(Submit)
    return CODEC.decode(job.prompt_ids, skip_special=False)


def test_what_is_piped_in_is_part_of_the_question(broker, own_cache):
    """At its end, without a word that asks for it."""
    command = [*SPECQ, "chat", "--broker", broker.address, "Sum this up:"]
    done = subprocess.run(command, input="eggs\n", capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Sum this up: eggs" in _asked_of(broker)


@pytest.mark.slow
def test_an_open_pipe_that_nobody_writes_to_is_not_waited_for(broker, own_cache):
    """As test runners leave it to what they start: the question is asked, and what was not read is said."""
    read_end, write_end = os.pipe()
    command = [*SPECQ, "chat", "--broker", broker.address, "What is it?"]
    with os.fdopen(read_end, "rb") as ours, os.fdopen(write_end, "wb"):
        done = subprocess.run(command, stdin=ours, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "nothing came on standard input within 5 s; going on without it" in done.stderr
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


@pytest.mark.parametrize(("asked", "hint"), [("smolm2", "; did you mean 'smollm2'?"), ("nothing-alike", "")])
def test_a_name_that_no_verifier_could_have_is_refused_at_once(spawn, asked, hint):
    """Though `--wait-seconds` is 600 by default."""
    with FakeBroker(OtherModels("smollm2")) as broker:
        process = spawn("chat", "--broker", broker.address, "--model", asked, "hi")
        assert process.wait(PATIENCE_S) == 2
    said = f"specq: the model {asked!r} is not served by the broker at {broker.address}; served are smollm2{hint}\n"
    assert process.output.read_text() == said


def test_while_a_known_model_is_waited_for_it_is_said_what_is_served(spawn):
    models = OtherModels("smollm2")
    with FakeBroker(models) as broker:
        process = spawn("chat", "--broker", broker.address, "--model", "tiny", "hi")
        waits = (
            f"specq: waiting for a verifier of model 'tiny' to register with the broker at {broker.address} "
            "(served are smollm2), at most 600 s (--no-wait: fail instead)\n"
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
    done = subprocess.run(
        [*SPECQ, "chat"], input=" \n", capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert "the question is empty" in done.stderr


@pytest.mark.parametrize(("encoding", "said"), [("ascii:strict", "ascii"), ("utf-8:strict", "utf-8")])
def test_a_question_in_another_encoding_is_refused(encoding, said):
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    asked = {"input": b"sch\xf6n\n", "env": environment, "timeout": PATIENCE_S}
    done = subprocess.run([*SPECQ, "chat"], capture_output=True, check=False, **asked)
    assert done.returncode == 2
    assert f"standard input is not valid {said}" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.slow
def test_one_question_from_a_pipe():
    """The answer alone goes to standard output; beside it stands what is done before there is one. All processes have
    ended."""
    command = [*SPECQ, *TINY, "Say", "-"]
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, check=False, timeout=PATIENCE_S)
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
    command = [*SPECQ, "chat", "--model", str(tmp_path / "cut.gguf"), "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "cut.gguf is no GGUF file: it has 5 bytes" in done.stderr
    assert "Traceback" not in done.stderr


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._shown, self._has_ended = b"", False
        self.pid, self._file = pty.fork()
        if not self.pid:
            os.execvpe(command[0], command, os.environ | environment)
        os.set_blocking(self._file, False)

    def wait_for(self, text: str) -> str:
        """Wait until the text is shown; return what was shown since the last one."""
        deadline = time.monotonic() + PATIENCE_S
        while text.encode() not in self._shown:
            assert time.monotonic() < deadline, self._shown.decode()
            self._read()
        before, _, self._shown = self._shown.partition(text.encode())
        return before.decode()

    def _read(self) -> None:
        try:
            self._shown += os.read(self._file, 4096)
        except BlockingIOError:
            time.sleep(0.02)

    def send(self, text: str) -> None:
        os.write(self._file, text.encode())

    def end(self) -> int:
        self._has_ended = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hang up; whoever does not end then is killed."""
        os.close(self._file)
        deadline = time.monotonic() + HANG_UP_S
        while not self._has_ended:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            self._has_ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            time.sleep(0.02)


@pytest.mark.slow
def test_a_conversation_in_a_terminal():
    """Marks instead of colours for NO_COLOR; Ctrl-C stops an answer, Ctrl-D ends the chat."""
    with Terminal(*SPECQ, *TINY, NO_COLOR="1", TERM="xterm") as terminal:
        assert "«corrected by the target»" in terminal.wait_for("> ")
        terminal.send("hello\r")
        assert "\x1b[3" not in terminal.wait_for("tokens/s")
        terminal.wait_for("> ")
        terminal.send("/mode plain\r/max 4000\r/nonsense\r")
        terminal.wait_for("unknown command /nonsense; known are /help")
        terminal.wait_for("> ")
        while True:  # until Ctrl-C comes before the end of an answer, which may be short
            terminal.send("1 2 3 4 5 6 7 8 9 10 11 12\r")
            terminal.wait_for("\u2039")  # the first token is the target's own
            terminal.send("\x03")
            if "(stopped)" in terminal.wait_for("> "):
                break
            terminal.wait_for(
                "ends the chat"
            )  # the answer had ended: what is typed before Ctrl-C has come would be lost
            terminal.wait_for("> ")
        terminal.send("\x04")
        assert terminal.end() == 0

"""The verifier's end of the process that tries grammars (`trial`): started at the first one, replaced when it ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import NamedTuple

import orjson

from specq.grammar.limits import GrammarLimits
from specq.protocol import ConfigError
from specq.runtime import reap

START_S = 60.0  # for Python, the imports and the tokenizer, on a busy machine
END_S = 5.0
_CHUNK = 1 << 16


class TrialVerdict(NamedTuple):
    """What a trial found.

    reason      why the grammar is refused, "": it is not
    is_final    a second trial would find the same
    """

    reason: str
    is_final: bool = True


class TrialProcess:
    """Tries one grammar at a time. Only `close` may be called from another thread.

    The thread that calls `tried` must live as long as the process is needed: Linux ends the process with it.
    """

    def __init__(self, files: dict[str, str], vocab_size: int, end_ids: tuple[int, ...], limits: GrammarLimits) -> None:
        self._options = {"files": files, "vocab_size": vocab_size, "end_ids": end_ids, "limits": asdict(limits)}
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process's id. None: it is not running."""
        return self._process.pid if self._process is not None else None

    def tried(self, grammar: str) -> TrialVerdict:
        """Try a grammar. A process that exceeds a limit is ended, and the next grammar starts another."""
        verdict = self._tried_once(grammar)
        if verdict is None and not self._is_closed:  # killed from outside: that says nothing about the grammar
            verdict = self._tried_once(grammar)
        return verdict or TrialVerdict("grammar: its trial was killed", is_final=False)

    def _tried_once(self, grammar: str) -> TrialVerdict | None:
        """Return the verdict. None: the process was killed."""
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        try:
            if self._process is None:
                self._start()
            return TrialVerdict(self._ask({"grammar": grammar}, self._limits.trial_s))
        except TimeoutError:
            self._stop()
            return TrialVerdict(f"grammar: its trial took more than {self._limits.trial_s:g} s", is_final=False)
        except (BrokenPipeError, EOFError):
            return self._verdict_of_end(self._stop(END_S))

    def _verdict_of_end(self, status: int) -> TrialVerdict | None:
        if status == -signal.SIGKILL:
            return None
        if status == -signal.SIGABRT:  # what Rust does without memory
            return TrialVerdict(self._limits.memory_reason)
        if status in (-signal.SIGSEGV, -signal.SIGBUS):
            return TrialVerdict("grammar: it nests too deeply")
        return TrialVerdict(f"grammar: its trial ended with status {status}", is_final=False)

    def close(self) -> None:
        """End the process. A trial that is running ends with a reason."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()

    def reap(self) -> None:
        """Wait for the process, after `close`."""
        if self._process is not None:
            self._stop()

    def _stop(self, patience_s: float = 0.0) -> int:
        """End the process, at once or where it has not ended itself within `patience_s`. Return its exit status."""
        process, self._process = self._process, None
        assert process is not None
        if not patience_s:
            process.kill()
        reap(process, patience_s or END_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.returncode

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "specq.grammar.trial", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic may quote the grammar
            env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "MALLOC_ARENA_MAX": "1"},
            bufsize=0,
        )
        if self._is_closed:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        reason = self._ask(self._options, START_S)
        if reason:
            raise ConfigError(reason)

    def _ask(self, message: object, patience_s: float) -> str:
        """Send a line and return the answer. Raises TimeoutError, or OSError where the process has ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + patience_s
        unsent, answer = memoryview(orjson.dumps(message) + b"\n"), b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                if not ready:
                    raise TimeoutError
                if process.stdin in ready:
                    unsent = unsent[os.write(process.stdin.fileno(), unsent[:_CHUNK]) :]
                    if not unsent:
                        selector.unregister(process.stdin)
                if process.stdout in ready:
                    data = os.read(process.stdout.fileno(), _CHUNK)
                    if not data:
                        raise EOFError
                    answer += data
        return str(orjson.loads(answer)["reason"])

"""The process in which a verifier first tries a grammar: `python -m specq.grammar.trial PARENT`.

Lines of JSON over its pipes. First the tokenizer and the limits, answered by {"reason": ""}. Then {"grammar": text} for
each grammar, answered by {"reason": text}, where "" means that it may be built. `trial_process` is the other end.

Rules: nothing that a grammar does here reaches the verifier. The process ends with its parent. A grammar has a limited
amount of memory beyond what the process has when it arrives. The parent ends a process that takes too long.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orjson

from specq.grammar.building import try_grammar
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import GrammarTokenizer, build_tokenizer
from specq.protocol import SpecqError

STACK_BYTES = 1 << 20  # less than any thread of the verifier has: what recurses too deeply fails here
NICENESS = 5  # steps of a verifier on the same cores go first
_PR_SET_PDEATHSIG = 1
_PAGES = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Pipes:
    """The lines from the parent, and the file of the answers."""

    lines: Iterator[bytes]
    answers: IO[bytes]

    def answer(self, reason: str) -> None:
        self.answers.write(orjson.dumps({"reason": reason}) + b"\n")
        self.answers.flush()


def main(parent: int) -> None:
    """Serve the trials of `parent` until it closes the pipe or ends."""
    _end_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    pipes = Pipes(iter(sys.stdin.buffer.readline, b""), answers)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(pipes,), daemon=True)
    thread.start()
    thread.join()


def _end_with(parent: int) -> None:
    """End this process when its parent ends, also while a grammar is tried (on Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _serve(pipes: Pipes) -> None:
    setup = next(pipes.lines, b"")
    if not setup:
        return
    options = orjson.loads(setup)
    limits = GrammarLimits(**options.pop("limits"))
    try:
        tokenizer = build_tokenizer(**options)
    except SpecqError as error:
        pipes.answer(str(error))
        return
    pipes.answer("")
    gc.freeze()
    for line in pipes.lines:
        pipes.answer(_tried(tokenizer, orjson.loads(line)["grammar"], limits))


def _tried(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> str:
    """Return why a grammar is refused. "": it is not."""
    _limit_memory(limits.trial_bytes)
    try:
        try_grammar(tokenizer, grammar, limits)
    except SpecqError as error:
        return str(error)
    except MemoryError:
        return limits.memory_reason
    except BaseException as error:  # noqa: BLE001 - a panic of Rust code is not an Exception
        return f"grammar: {type(error).__name__}: {error}"[:300]
    return ""


def _limit_memory(num_bytes: int) -> None:
    """Allow this process `num_bytes` more than it has now."""
    if _PAGES.exists():
        used = int(_PAGES.read_text().split()[0]) * resource.getpagesize()
        with suppress(ValueError, OSError):  # a lower hard limit, which stays
            resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A rival in a separate process, so that its memory can be measured, and it is idle while others are measured.

Memory is read from /proc, and empty on other systems.

Both sides send lines of JSON. The input has the arguments of `complete`, the output its result, or {"error": why}. The
process loads its model before the first line, and then writes {"ready": ...}. Seconds are measured in the process, so
the pipe costs the rival nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import TracebackType
from typing import Any, Self

from bench.deployments import PYTHON
from specq.protocol import EngineError
from specq.runtime import reap

_FIELDS = {"VmHWM": "peak_mb", "VmRSS": "now_mb"}


def memory_of(processes: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return megabytes (10^6 bytes) of resident memory by the name of each process: the most so far, and now."""
    return {name: found for name, pid in processes.items() if (found := _read(pid))}


def _read(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.partition(":")[0] in _FIELDS)
    return {_FIELDS[name]: round(int(value.split()[0]) * 1024 / 1e6, 1) for name, value in pairs}


Complete = Callable[..., dict[str, Any]]
PATIENCE_S = 60.0  # for a process to end by itself
SHOWN = 1500  # characters of a failed process's output


class Child:
    """The process of a rival; `arguments` are the rest of its command line: see KINDS."""

    def __init__(self, kind: str, *arguments: object) -> None:
        self._command = [*PYTHON, __name__, kind, *map(str, arguments)]

    def __enter__(self) -> Self:
        self._log = TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        reap(self._process, PATIENCE_S)
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdout.close()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> dict[str, Any]:
        """Return the process's description once it has loaded its model; EngineError with its output if it fails."""
        ready: dict[str, Any] = self._answer()["ready"]
        return ready

    def complete(self, **arguments: Any) -> dict[str, Any]:
        """Complete a text; raises EngineError if the process ends or refuses."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its output has the reason
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._epitaph()}
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    def _epitaph(self) -> str:
        self._process.wait()
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace")[-SHOWN:]
        return f"{' '.join(self._command[3:])} ended with status {self._process.returncode}: {printed}"


def _transformers(model: str, draft_model: str) -> tuple[dict[str, Any], Complete]:
    from bench.rivals.transformers import Rivals
    from bench.scenario import Settings
    from specq.samples import Prompt

    rivals = Rivals(model, draft_model)

    def complete(
        token_ids: list[int], max_tokens: int, *, assisted: bool = False, k: int = 5, **options: Any
    ) -> dict[str, Any]:
        settings = Settings(output_len=max_tokens, k=k, **options)
        found = rivals.generate(Prompt("", "", tuple(token_ids)), settings, assisted=assisted)
        noted = {"first_s": found.first_token_ms / 1e3, "num_first": found.num_first, "seconds": found.seconds}
        return {"token_ids": found.token_ids, **noted, **found.stats}

    return {"threads": rivals.num_threads}, complete


def _llama(model: str, num_threads: str, num_lookup: str, is_fastest: str) -> tuple[dict[str, Any], Complete]:
    from bench.rivals.llama import LlamaCpp, in_fastest_format

    with TemporaryDirectory() as directory:  # the model stays mapped
        path = in_fastest_format(model, directory) if is_fastest == "True" else model
        llama = LlamaCpp(path, int(num_threads), int(num_lookup))
    return {"threads": int(num_threads)}, llama.complete


def _vllm(model: str, dtype: str) -> tuple[dict[str, Any], Complete]:
    from bench.rivals.vllm import Vllm

    vllm = Vllm(model, dtype)
    return {"dtype": vllm.dtype}, vllm.complete


KINDS: dict[str, Callable[..., tuple[dict[str, Any], Complete]]] = {
    "transformers": _transformers,
    "llama.cpp": _llama,
    "vllm": _vllm,
}


def main() -> None:
    """Load a rival, then complete the requests on standard input until it ends.

    The output of libraries goes to the log.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    about, complete = KINDS[sys.argv[1]](*sys.argv[2:])
    say({"ready": about})
    for line in sys.stdin:
        say(_attempt(complete, json.loads(line)))


def _attempt(complete: Complete, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return complete(**arguments)
    except Exception as error:  # noqa: BLE001 - the other side raises it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()

"""How much the pair's processes slow each other down on this machine: each is timed alone, and beside the other.

The neighbour is a separate process, `python -m bench.calibrate.neighbours step|pass MODEL CORE...`, which computes
without a pause until its input ends. It is stopped and continued in turns, so that both times come from the same state
of the machine.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import click

from bench.deployments import PYTHON
from specq.config import DraftConfig
from specq.doctor.hardware import SOME, SOME_ROWS, load_engine, load_proposer, pass_times, pinned, step_times
from specq.protocol import EngineError
from specq.runtime import give_way

Times = Callable[[], list[float]]


def stretch(times: Times, kind: str, model: str, cores: Sequence[int], repeats: int) -> float:
    """Return the factor by which a running neighbour lengthens the timed work; at least 1."""
    alone, beside = [], []
    with _neighbour(kind, model, cores) as neighbour:
        for _ in range(repeats):
            neighbour.send_signal(signal.SIGSTOP)
            alone += times()
            neighbour.send_signal(signal.SIGCONT)
            beside += times()
    return max(1.0, round(median(beside) / median(alone), 4))


@contextmanager
def _neighbour(kind: str, model: str, cores: Sequence[int]) -> Iterator[subprocess.Popen[str]]:
    """Start a neighbour, and wait until it computes."""
    command = [*PYTHON, "bench.calibrate.neighbours", kind, model, *map(str, cores)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None, "it was asked for"
        if not process.stdout.readline():
            raise EngineError(f"the process that computes beside what is timed ended with status {process.wait()}")
        yield process
    finally:
        process.kill()
        process.communicate()


def main(kind: str, model: str, *cores: str) -> None:
    """Compute until the input ends."""
    ended = threading.Event()
    threading.Thread(target=_await_end, args=(ended,), daemon=True).start()
    if kind == "pass":
        give_way(DraftConfig().nice)  # as drafters compute
    with pinned([int(core) for core in cores]):
        times = timed(kind, model, len(cores))
        times()
        click.echo("computes")
        while not ended.is_set():
            times()


def _await_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def timed(kind: str, model: str, threads: int = 1) -> Times:
    """Return a function that runs some steps (or passes) and returns their milliseconds."""
    if kind == "step":
        engine = load_engine(model, threads)
        return lambda: step_times(engine, 1, SOME_ROWS, SOME, busy_s=0)
    proposer = load_proposer(model)
    return lambda: pass_times(proposer, SOME_ROWS, SOME, pause_s=0)


if __name__ == "__main__":
    main(*sys.argv[1:])

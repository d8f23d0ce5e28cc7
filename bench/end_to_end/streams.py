"""What users see of completions: tokens a second, the first token, and the time between tokens.

The definitions are those of `vllm bench serve`:

    first_token_ms   median time from the request to the arrival of the first token
    itl_ms, itl_p99_ms   inter-token latency, median and 99th percentile: the time between two arrivals of tokens of
                     one completion. Tokens that arrive together (of one verdict, or one step of vLLM) are one arrival
    tpot_ms, tpot_p90_ms   median and 90th percentile over completions of the time from the first arrival to the last
                     one, for each token after the first; the slowest tenth take longer than the latter

In addition, `busy_tokens_per_second` is the rate until the last job of a run was requested, while the full number of
jobs runs. After that the run thins out. It thins out more if the jobs' times differ, as they do with drafts.

Rule: an arrival is noted where a user's program gets the tokens: at specq's client behind its sockets, and at the
output of `LLMEngine.step`.

A client notes in its I/O thread when tokens arrive and jobs end, so that many jobs cost almost nothing. One thread
requests all jobs. One thread for each job would compete with the reading thread, in turns of milliseconds.

A run may be interrupted by Ctrl-C or SIGTERM (as sent by `timeout`). An exception carries the results to the report,
together with the cause of the end."""

from __future__ import annotations

import queue
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specq.client import Client, Event, Job, NewTokens, Request, Result, ServedModel


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """How many jobs run at a time, and their sampling temperature; the key is its name in a report."""

    sessions: int
    temperature: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.sessions} T={self.temperature:g}" if self.temperature else str(self.sessions)


@dataclass(slots=True)
class Stream:
    """A completion: its tokens, when it was requested, and when some tokens arrived.

    Times are seconds of one clock. Empty: not noted.
    """

    token_ids: list[int]
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)


class Repetitions:
    """Repetitions of one run."""

    def __init__(self, load: StreamLoad) -> None:
        self._load, self._rates, self._streams = load, list[float](), list[Stream]()
        self._busy_rates = list[float]()
        self.seconds = 0.0  # of all repetitions

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return self._rates

    def add(self, complete: Callable[[], Sequence[Stream]]) -> None:
        """Complete all prompts of the run once."""
        started = time.perf_counter()
        streams = complete()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self._rates.append(sum(len(stream.token_ids) for stream in streams) / seconds)
        self._streams += streams
        self._busy_rates += busy_rate(streams)

    def figures(self) -> dict[str, Any]:
        """Return the load, the rates, the users' figures of all repetitions, and the beginnings of the last texts."""
        rate = statistics.median(self._rates)
        return {
            "sessions": self._load.sessions,
            "temperature": self._load.temperature,
            "tokens_per_second": round(rate, 1),
            "per_user": round(rate / self._load.sessions, 1),
            "rates": [round(rate, 1) for rate in self._rates],
            **({"busy_tokens_per_second": round(statistics.median(self._busy_rates), 1)} if self._busy_rates else {}),
            **latencies(self._streams),
            "texts": [stream.token_ids[:32] for stream in self._streams[-4:]],
        }


def busy_rate(streams: Sequence[Stream]) -> list[float]:
    """Return the tokens a second until the last completion of a run was requested; empty if no token arrived by then.

    All arrivals of a completion count as the same number of tokens.
    """
    began, until = min(stream.started for stream in streams), max(stream.started for stream in streams)
    noted = [(len(one.token_ids) / len(one.arrivals), one.arrivals) for one in streams if one.arrivals]
    num_tokens = sum(each * bisect_right(arrivals, until) for each, arrivals in noted)
    return [num_tokens / (until - began)] if num_tokens else []


def latencies(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the latencies (see above) of completions, in milliseconds; unknown ones are left out."""
    noted = [stream for stream in streams if stream.arrivals]
    gaps = sorted(later - earlier for stream in noted for earlier, later in pairwise(stream.arrivals))
    longer = [stream for stream in noted if len(stream.token_ids) > 1]
    each = sorted((one.arrivals[-1] - one.arrivals[0]) / (len(one.token_ids) - 1) for one in longer)
    return {
        **_median("first_token_ms", (stream.arrivals[0] - stream.started for stream in noted)),
        **_median("itl_ms", gaps),
        **({"itl_p99_ms": round(gaps[-1 - len(gaps) // 100] * 1e3, 2)} if gaps else {}),
        **_median("tpot_ms", each),
        **({"tpot_p90_ms": round(each[-1 - len(each) // 10] * 1e3, 2)} if each else {}),
    }


def _median(name: str, seconds: Iterable[float]) -> dict[str, float]:
    found = list(seconds)
    return {name: round(statistics.median(found) * 1e3, 2)} if found else {}


class _ListeningJob(Job):
    """A job that notes when it was submitted and when its tokens arrived, and reports its end."""

    def __init__(self, client: ListeningClient, request: Request, served: ServedModel) -> None:
        self.started, self.arrivals, self._all_ended = time.perf_counter(), list[float](), client.ended
        super().__init__(client, request, served)

    def _take(self, event: Event) -> None:
        if isinstance(event, NewTokens):
            self.arrivals.append(time.perf_counter())
        super()._take(event)
        if self.done:
            self._all_ended.put(self)


class ListeningClient(Client):
    """A client whose jobs note when their tokens arrive. `ended`: the ended jobs, in that order."""

    def __init__(self, broker: str) -> None:
        self.ended: queue.SimpleQueue[_ListeningJob] = queue.SimpleQueue()
        super().__init__(broker)

    def complete(
        self, requests: Iterable[Mapping[str, Any]], num_at_once: int, patience_s: float
    ) -> list[tuple[Stream, Result]]:
        """Complete prompts, `num_at_once` at a time, and return the results in order; request arguments as in `submit`.

        Raises JobError if a job failed, and TimeoutError if none ended for `patience_s` seconds.
        """
        running, found = dict[int | str, int](), dict[int, tuple[Stream, Result]]()
        for place, arguments in enumerate(requests):
            job = self.submit(**arguments)
            running[job.id] = place
            while len(running) == num_at_once:
                self._take_ended(running, found, patience_s)
        while running:
            self._take_ended(running, found, patience_s)
        return [found[place] for place in sorted(found)]

    def _take_ended(
        self, running: dict[int | str, int], found: dict[int, tuple[Stream, Result]], patience_s: float
    ) -> None:
        """Wait for the end of a job, and store its result if it is one of these."""
        try:
            job = self.ended.get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"none of {len(running)} jobs ended in {patience_s:g} s") from None
        if (place := running.pop(job.id, None)) is not None:
            result = job.result()
            found[place] = Stream(result.token_ids, job.started, job.arrivals), result

    def _job(self, request: Request, served: ServedModel) -> Job:
        return _ListeningJob(self, request, served)


class CutShortError(BaseException):
    """`found`: the results so far; `stop`: the exception that ended the run."""

    def __init__(self, found: dict[str, Any], stop: BaseException) -> None:
        super().__init__("cut short")
        self.found, self.stop = found | {"error": "cut short"}, stop


@contextmanager
def keeping(found: dict[str, Any]) -> Iterator[None]:
    """Attach the results so far, a dict that the body fills, to an exception that ends the run."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        raise CutShortError(found, stop) from None

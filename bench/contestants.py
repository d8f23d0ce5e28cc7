"""The contestant specq, over its own processes. Rivals have processes of their own. For turns see `bench.turns`.

plain        specq without any speculation: no drafters, and no lookups by the verifier (`mode="plain"`).
lookup       specq without drafters, whose verifier drafts what the text repeats. It runs on the processes of `plain`.
and so on    see the suites: the deployment (`bench.deployments`) and the jobs' options set what drafts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.processes import cpu_seconds
from bench.scenario import Completion, Settings
from specq.client import Client
from specq.samples import Prompt

PLAIN, LOOKUP = "plain", "lookup"
NO_DRAFTS = {"mode": "plain"}  # options of the jobs of `plain`


class Specq:
    """specq, through a client, over the sockets."""

    def __init__(
        self, name: str, client: Client, concurrency: int = 0, options: Mapping[str, Any] | None = None, *,
        pids: Mapping[str, int] | None = None, streams: bool = False,
    ) -> None:  # fmt: skip
        """Set the parameters of the jobs.

        options  parameters of each job beside those of the settings, as for `specq.Client.generate`.
        pids     specq's processes. `cpu_s` counts the processor seconds of each in this contestant's turns.
        streams  whether to read texts as a stream and note the arrival times.
        """
        self.name, self.client, self.concurrency, self._streams = name, client, concurrency, streams
        self.options, self._pids, self.cpu_s = dict(options or {}), dict(pids or {}), Counter[str]()

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts."""
        complete, before = self._stream if self._streams else self._complete, self._cpu_seconds()
        with ThreadPoolExecutor(self.concurrency or settings.concurrency) as pool:
            found = list(pool.map(lambda prompt: complete(prompt, settings), prompts))
        self.cpu_s.update({name: seconds - before[name] for name, seconds in self._cpu_seconds().items()})
        return found

    def _cpu_seconds(self) -> dict[str, float]:
        """Return the processor seconds of each process so far; empty without /proc."""
        found = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def _asked(self, prompt: Prompt, settings: Settings) -> dict[str, Any]:
        names = ("temperature", "seed", "ignore_eos")
        given = {name: getattr(settings, name) for name in names} | self.options
        return {"token_ids": list(prompt.token_ids), "max_tokens": settings.output_len, **given}

    def _complete(self, prompt: Prompt, settings: Settings) -> Completion:
        result = self.client.generate(**self._asked(prompt, settings))
        return Completion(result.token_ids, result.stats["time_to_first_token_ms"], result.stats | result.internal)

    def _stream(self, prompt: Prompt, settings: Settings) -> Completion:
        token_ids, stats = list[int](), dict[str, Any]()
        num_first, first_s, started = 0, 0.0, time.perf_counter()
        for piece in self.client.stream(**self._asked(prompt, settings)):
            token_ids += piece.token_ids
            if token_ids and not num_first:
                num_first, first_s = len(token_ids), time.perf_counter() - started
            stats = piece.result.stats | piece.result.internal if piece.result else stats
        return Completion(token_ids, 1e3 * first_s, stats, num_first, time.perf_counter() - started)

"""The workload of every contestant."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from bench.end_to_end.streams import Repetitions, Stream, StreamLoad
from specq.config import TargetConfig, own_options
from specq.engines import ENGINES
from specq.protocol import ConfigError
from specq.samples import codec_of, load_prompts

LEAST_JOBS = 8  # of a run
NODES = 64  # KV slots of a job for drafts, and for the rest of its last block
JOBS_EACH = 3  # jobs of each session, one after the other; with more jobs the end, when fewer run, weighs less
VLLM = "vllm"  # the engine
MAX_LEN = 2048  # tokens of a context in vLLM
NUM_MARKS = 1000
TURN = 0.6180339887498949  # of a circle: successive points at this distance are spread evenly
WARM_LEN = 16  # tokens of each completion before the first repetition, for contestants that do not learn

Complete = Callable[[list[list[int]], int], list[Stream]]  # prompts, and how many tokens each gets


def check_engine(engine: str, engine_options: Sequence[str], tensor_parallel_size: int) -> None:
    """Raise ConfigError for options that the engine does not know, and for several GPUs if it runs on one."""
    if tensor_parallel_size > 1 and engine != VLLM:
        raise ConfigError(f"the {engine} engine runs on one GPU; --tensor-parallel-size needs --engine {VLLM}")
    given = TargetConfig(engine=engine, engine_options=tuple(engine_options))
    own_options(given, ENGINES.resolve(engine).options, ENGINES.names())


@dataclass(frozen=True)
class Workload:
    """The pair, the prompts (token ids), how many run at a time, and how many tokens each gets.

    temperatures      the first with all `sessions`, the others with `sampled_sessions`, or with all if there are none.
    engine            of specq's verifiers.
    tensor_parallel_size  GPUs among which vLLM divides each layer, as a rival and as an engine.
    settle_s          seconds of service before the measurement, for contestants that learn which drafts pay off.
    engine_options    name=value each, passed to specq's engine.
    modes             modes in which specq's deployments are measured. Empty: all of each.
    marks             a few tokens each. With marks no prompt repeats: see `prompts_for`.
    jobs_each         jobs of each session, one after the other.
    length_spread     how far completions are longer or shorter than `output_len`, as a share of it: see `lengths`.
    """

    pair: str
    device: str
    sessions: list[int]
    output_len: int
    repeats: int
    prompts: list[list[int]]
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    sampled_sessions: list[int] = field(default_factory=list)
    engine: str = "torch"
    tensor_parallel_size: int = 1
    settle_s: float = 0.0
    engine_options: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    marks: list[list[int]] = field(default_factory=list)
    length_spread: float = 0.0
    jobs_each: int = JOBS_EACH

    @staticmethod
    def of(pair: Path, *, model: str = "tiny", fresh_prompts: bool = False, **given: Any) -> Workload:
        """Return the workload with prompts of GSM8K and HumanEval in turns, repeated if there are too few.

        model           has the tokenizer.
        fresh_prompts   no prompt repeats.
        given           the other fields, with tuples for lists.
        """
        codec = codec_of(model)
        marks = [list(codec.encode(f"#{number}\n")) for number in range(NUM_MARKS)] if fresh_prompts else []
        fields: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in given.items()
        }
        asked = Workload(str(pair), prompts=[], marks=marks, **fields)
        each = max(asked.most_sessions, LEAST_JOBS) // 2 + 1
        sets = [[list(p.token_ids) for p in load_prompts((name,), each, codec)] for name in ("gsm8k", "humaneval")]
        turns = islice(zip(*map(cycle, sets), strict=True), each)
        return replace(asked, prompts=[prompt for pair_of in turns for prompt in pair_of])

    @property
    def loads(self) -> list[StreamLoad]:
        """The runs of a contestant."""
        first, *others = self.temperatures
        sampled = [StreamLoad(count, other) for other in others for count in self.sampled_sessions or self.sessions]
        return [*(StreamLoad(count, first) for count in self.sessions), *sampled]

    @property
    def most_sessions(self) -> int:
        return max(load.sessions for load in self.loads)

    @staticmethod
    def load(path: Path) -> Workload:
        """Read a workload from a file of `save`."""
        return Workload(**json.loads(path.read_text("utf-8")))

    def save(self, path: Path) -> None:
        """Write the workload for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return its settings for a report."""
        values = asdict(self)
        lengths = [len(prompt) for prompt in values.pop("prompts")]
        return values | {"prompt_tokens": statistics.mean(lengths), "fresh_prompts": bool(values.pop("marks"))}

    def prompts_for(self, num_sessions: int, run: int = 0) -> list[list[int]]:
        """Return the prompts of a run with `num_sessions`.

        Without marks all prompts have been seen before the measurement, so contestants with prefix caching have their
        KV. With marks each prompt has one behind the common beginning of all prompts. The mark differs in each run and
        each repetition of a prompt.
        """
        own = len(self.prompts)
        found = [self.prompts[i % own] for i in range(self._num_jobs(num_sessions))]
        if not self.marks:
            return found
        first = run * (self._num_jobs(self.most_sessions) // own + 1)
        at = next((i for i, tokens in enumerate(zip(*self.prompts, strict=False)) if len(set(tokens)) > 1), 0)
        marks = (self.marks[(first + i // own) % len(self.marks)] for i in range(len(found)))
        return [[*prompt[:at], *mark, *prompt[at:]] for prompt, mark in zip(found, marks, strict=True)]

    def lengths(self, num_jobs: int, num_tokens: int) -> list[int]:
        """Return how many tokens each job gets, `num_tokens` on average, spread evenly, and the same in each run.

        Jobs of equal length end together without drafts, and so the next ones begin together. Jobs of real users do
        not.
        """
        spread = self.length_spread
        return [max(round(num_tokens * (1 + spread * (2 * (i * TURN % 1) - 1))), 1) for i in range(num_jobs)]

    @property
    def kv_slots(self) -> int:
        """KV slots for all prompts and texts of the largest run, so that none is computed twice."""
        prompts = self.prompts_for(self.most_sessions)
        return sum(map(len, prompts)) + sum(self.lengths(len(prompts), self.output_len)) + NODES * len(prompts)

    def _num_jobs(self, num_sessions: int) -> int:
        return max(self.jobs_each * num_sessions, LEAST_JOBS)

    def settle(self, prompts: list[list[int]], complete: Complete) -> None:
        """Complete all prompts once, and again until `settle_s` have passed."""
        until = time.monotonic() + self.settle_s
        complete(prompts, self.output_len)
        while time.monotonic() < until:
            complete(prompts, self.output_len)

    def timed(
        self,
        load: StreamLoad,
        complete: Complete,
        *,
        learns: bool = False,
        warmed: Callable[[], object] = lambda: None,
        variant: int = 0,
    ) -> dict[str, Any]:
        """Complete all prompts of a run for warm-up, call `warmed`, and complete them `repeats` times.

        The warm-up has few tokens. If the contestant `learns` which drafts pay off, it has all tokens and lasts until
        it has settled. Returns the figures of the repetitions. `variant`: the index of a contestant's variant, for
        different marks.
        """
        first = (variant * len(self.loads) + self.loads.index(load)) * (self.repeats + 1)
        runs = (self.prompts_for(load.sessions, run) for run in range(first, first + self.repeats + 1))
        found = Repetitions(load)
        if learns:
            self.settle(next(runs), complete)
        else:
            complete(next(runs), WARM_LEN)
        warmed()
        for prompts in runs:
            found.add(partial(complete, prompts, self.output_len))
        return found.figures()


def is_gpu(work: Workload) -> bool:
    """Return whether the contest is on a GPU."""
    return work.device.startswith("cuda")

"""transformers on the same pair: `generate`, and assisted generation.

Rule: the rival runs at its best. It computes in float32, as specq does on a CPU, with the fastest number of threads
(one, or one a core). specq's processes are idle meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from bench.drafts import quiet
from bench.scenario import Completion, Settings
from specq.engines.torch import load_network
from specq.models import resolve_model
from specq.runtime import available_cores
from specq.samples import Prompt

_TRIALS = 20


class Rivals:
    """The pair, loaded once for all measurements."""

    def __init__(self, model: str, draft_model: str) -> None:
        quiet()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.target = self._load(resolve_model(model, "target"))
        self.draft = self._load(resolve_model(draft_model, "draft"))
        self.num_forwards = 0
        self.target.register_forward_pre_hook(self._count)
        self.num_threads = self._pick_threads()

    def _load(self, model: str) -> Any:
        return load_network(Path(model), torch.device(self.device))

    def _count(self, *_: object) -> None:
        self.num_forwards += 1

    def _pick_threads(self) -> int:
        """Return the number of threads with which a forward pass of one row is fastest; all later ones use it."""
        times = {num: self._step_time(num) for num in {1, len(available_cores())}}
        best = min(times, key=lambda num: times[num])
        torch.set_num_threads(best)
        return best

    def _step_time(self, num_threads: int) -> float:
        torch.set_num_threads(num_threads)
        row, times = torch.ones((1, 1), dtype=torch.long, device=self.device), []
        with torch.inference_mode():
            for _ in range(_TRIALS):
                started = time.perf_counter()
                self.target(row)
                times.append(time.perf_counter() - started)
        return median(times)

    def generate(self, prompt: Prompt, settings: Settings, *, assisted: bool) -> Completion:
        """Complete one prompt; `stats` has the number of the target's forward passes (`rounds`)."""
        input_ids = torch.tensor([prompt.token_ids], device=self.device)
        config = self._config(settings)
        clock, self.num_forwards = _FirstToken(), 0
        torch.manual_seed(settings.seed)
        with torch.inference_mode():
            output = self.target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                assistant_model=self._assistant(settings) if assisted else None,
                streamer=clock,
            )
        token_ids, stats = output[0, len(prompt.token_ids) :].tolist(), {"rounds": self.num_forwards}
        return Completion(token_ids, clock.milliseconds(), stats, clock.num_first, clock.seconds())

    def _config(self, settings: Settings) -> Any:
        config = self.target.generation_config.__class__.from_dict(self.target.generation_config.to_dict())
        config.max_new_tokens, config.max_length = settings.output_len, None
        config.do_sample = settings.temperature > 0
        config.temperature = settings.temperature if config.do_sample else None
        config.top_k, config.top_p = (0, 1.0) if config.do_sample else (None, None)
        config.pad_token_id = config.pad_token_id or 0
        if settings.ignore_eos:
            config.eos_token_id = None
        return config

    def _assistant(self, settings: Settings) -> Any:
        self.draft.generation_config.num_assistant_tokens = settings.k
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        return self.draft

    def logit_gap(self, token_ids: Sequence[int], one: int, other: int) -> float:
        """Return by how much the target prefers one next token to the other (absolute difference of logits)."""
        with torch.inference_mode():
            logits = self.target(torch.tensor([list(token_ids)], device=self.device)).logits[0, -1].float()
        return float((logits[one] - logits[other]).abs())


class _FirstToken(BaseStreamer):
    """Notes when the first generated tokens arrive, and how many they are; the prompt arrives before them."""

    def __init__(self) -> None:
        self._started, self._first, self._calls, self.num_first = time.perf_counter(), 0.0, 0, 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self._first, self.num_first = time.perf_counter(), value.numel()

    def end(self) -> None:
        pass

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def milliseconds(self) -> float:
        return max(self._first - self._started, 0.0) * 1e3


class Transformers:
    """A contestant: `generate` with or without an assistant, one prompt after the other."""

    concurrency = 1

    def __init__(self, rivals: Rivals, name: str, *, assisted: bool) -> None:
        self.name, self._rivals, self._assisted = name, rivals, assisted

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts."""
        return [self._rivals.generate(prompt, settings, assisted=self._assisted) for prompt in prompts]

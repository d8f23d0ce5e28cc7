"""A verifier whose target has real logits and follows grammars; what its sessions say, drafted for in several ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch

from specq.drafting.grammar.source import ForcedTokens
from specq.drafting.suffix.source import SuffixDecoder
from specq.engines import check_asked
from specq.grammar import GrammarTokenizer
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.protocol import (
    NO_TAP,
    Ack,
    Draft,
    ModelInfo,
    Open,
    SamplingParams,
    SessionFailed,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
    Verdict,
)
from specq.testing.late import LateEngine
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import ToyEngine, toy_info
from specq.verification import StepBatch
from specq.verification.judge import judge_each
from specq.verifier import StepCurve, Verifier
from tests.grammar.naive import EOS, SMALL, small

PROMPT = [70, 71, 72]
VARIETY = 64  # of rows of logits


def rows_of(contexts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return logits [contexts, SMALL]: a function of the last two tokens and the length."""
    lasts = [((0, *context)[-2], context[-1], len(context)) for context in contexts]
    keys = [(7919 * before + 104_729 * last + 31 * length) % VARIETY for before, last, length in lasts]
    return torch.from_numpy(TABLE[keys])


TABLE = np.random.default_rng(3).normal(0, 3, (VARIETY, SMALL)).astype(np.float32)


def small_info() -> ModelInfo:
    """Return the description of the target."""
    return replace(toy_info(), vocab_size=SMALL, num_tokens=SMALL, eos_ids=(EOS, 0))


class LogitEngine(ToyEngine):
    """Computes rows of logits, and judges them as real engines do."""

    judges_late = takes_masks = True

    def __init__(self, info: ModelInfo | None = None, *, max_chain: int = 0) -> None:
        super().__init__(info or small_info(), max_chain=max_chain)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        check_asked(self, steps, tap)
        batch = StepBatch.of(steps)
        rows: list[list[int]] = []
        for step in batch:
            context = self.contexts[step.session_id]
            assert step.start == len(context), "start is not the KV length"
            context += step.token_ids.tolist()
            if step.judged:
                paths = [context]
                for token, parent in zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True):
                    paths.append([*paths[parent + 1], token])
                rows += paths
        self.num_rows.append(len(rows))
        judgements = judge_each(batch, rows_of(rows)) if rows else ()
        for judgement in judgements:
            self.contexts[judgement.session_id] += judgement.token_ids[:-1].tolist()
        return StepOutput(judgements)


class LateLogitEngine(LateEngine, LogitEngine):
    """The same, with steps that are launched before the last one is collected."""


class Builder:
    """Builds at once. `limits` of single sessions."""

    on_ready: Callable[[], None] | None = None

    def __init__(self, tokenizer: GrammarTokenizer, limits: dict[int, GrammarLimits] | None = None) -> None:
        self._tokenizer, self._limits, self._ready = tokenizer, limits or {}, list[tuple[int, Any, str]]()

    def tokenizer(self) -> GrammarTokenizer:
        return self._tokenizer

    def begin(self, key: int, grammar: str, owner: str = "") -> None:
        self._ready.append((key, build_matcher(self._tokenizer, grammar, self._limits.get(key, GrammarLimits())), ""))

    def ready(self) -> list[tuple[int, Any, str]]:
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, key: int) -> None:
        self._ready = [one for one in self._ready if one[0] != key]

    def close(self) -> None:
        pass


@dataclass
class Said:
    """What a session said."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    failed: str = ""
    logprobs: list[float] = field(default_factory=list)
    origins: set[int] = field(default_factory=set)


class GrammarService:
    """A verifier and its sessions.

    guesses  what remote drafters guess: a session's text, given its id; some tokens of it are spoilt.
    """

    def __init__(
        self,
        *,
        overlaps: bool = False,
        guesses: Callable[[int], list[int]] | None = None,
        limits: dict[int, GrammarLimits] | None = None,
        seed: int = 0,
    ) -> None:
        self.engine = LateLogitEngine(small_info()) if overlaps else LogitEngine()
        self.verifier = Verifier(
            self.engine, StepCurve([1, 64], [0.005, 0.006]), [SuffixDecoder(0), ForcedTokens()], incarnation=1,
            measures_drafts=False, grammar_builder=Builder(small(), limits), tokenizer_files=tokenizer_files(),
        )  # fmt: skip
        self.said: dict[int, Said] = {}
        self._guesses, self._random, self._next_ids = guesses, Random(seed), dict[int, int]()

    def open(
        self, session_id: int, grammar: dict[str, Any] | None, *, tokens_left: int = 40, mode: str = "async",
        so_far: Sequence[int] = (), **params: Any,
    ) -> None:  # fmt: skip
        """Open a session; `so_far`: what it has said elsewhere."""
        own = SamplingParams(grammar=json.dumps(grammar) if grammar else "", max_tokens=tokens_left, **params)
        message = Open(
            session_id=session_id, epoch=1, prompt_len=len(PROMPT), tokens_left=tokens_left, params=own,
            speculation=Speculation(mode=mode), token_ids=np.array([*PROMPT, *so_far], np.int32),
        )  # fmt: skip
        self.said[session_id] = Said([*so_far])
        self._hear([*self.verifier.handle(message, 0.0), *self.verifier.take_grammars()])

    def run(self) -> dict[int, Said]:
        """Step until all sessions have ended or failed."""
        for _ in range(400):
            if all(said.finish or said.failed for said in self.said.values()):
                return self.said
            self._draft()
            self.verifier.begin(0.0)
            self._hear(self.verifier.step(lambda: 0.0))
            self.verifier.heartbeat()
        raise AssertionError("the sessions never end")

    def _hear(self, messages: Sequence[Any]) -> None:
        for message in messages:
            said = self.said[message.session_id]
            if isinstance(message, SessionFailed):
                said.failed = message.reason
                continue
            assert isinstance(message, Verdict)
            said.token_ids += message.token_ids.tolist()
            said.logprobs += message.logprobs.tolist()
            said.origins.update(message.origins.tolist())
            said.finish = message.finish
            end = message.base_len + len(message.token_ids)
            self.verifier.handle(Ack(session_id=message.session_id, epoch=1, length=end), 0.0)

    def _draft(self) -> None:
        """Send a small tree for each session: a guess, and a token beside each of its tokens."""
        if self._guesses is None:
            return
        for session in list(self.verifier.sessions.values()):
            if session.finish or session.speculation.mode == "plain" or self._random.random() < 0.2:
                continue
            text = self._guesses(session.session_id)[session.length - len(PROMPT) :][:4]
            first, tokens, parents = self._next_ids.get(session.session_id, 0), list[int](), list[int]()
            above = -1
            for token in text:
                wrong = self._random.choice([self._random.randrange(SMALL), EOS, 67])
                own, other = (wrong, token) if self._random.random() < 0.2 else (token, wrong)
                tokens += [own, other] if own != other else [own]
                parents += [above] * (2 if own != other else 1)
                above = first + len(tokens) - (2 if own != other else 1)
            self._next_ids[session.session_id] = first + len(tokens)
            draft = Draft(
                session_id=session.session_id, epoch=1, lane=0, base_len=session.length, first_id=first,
                token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32),
                scores=np.full(len(tokens), -0.3, np.float16),
            )  # fmt: skip
            self.verifier.handle(draft, 0.0)

"""A toy model for tests of everything around the model: exact, stateless, instant.

The toy target's next token is a hash of the last two tokens. `ToyEngine` tracks open sessions and their KV as a real
engine does. It fails loudly if the verifier breaks the contract. `ToyProposer` knows the target, and is wrong at known
places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.engines import check_asked
from specq.protocol import (
    NO_TAP,
    EngineError,
    Float32Array,
    Int32Array,
    Judgement,
    Logprobs,
    ModelInfo,
    ScoredRows,
    SessionRows,
    SessionStep,
    StepOutput,
    Tap,
)

VOCAB = 50
WRONG_EVERY = 5
EOS = 0


def toy_info(name: str = "toy", *, kv_slots: int = 10_000, tokenizer: str = "toy-tokenizer") -> ModelInfo:
    """Return the description of a toy model."""
    return ModelInfo(
        name=name,
        fingerprint="toy",
        dtype="int",
        engine="toy",
        vocab_size=VOCAB,
        num_tokens=VOCAB,
        eos_ids=(EOS,),
        max_length=2000,
        tokenizer_hash=tokenizer,
        kv_slots=kv_slots,
    )


def next_token(context: Sequence[int], seed: int = 0) -> int:
    """Return the toy target's token after a context, never EOS."""
    a, b = (0, *context)[-2:]
    return 1 + (a * 7919 + b * 104729 + len(context) * 31 + seed * 17) % (VOCAB - 1)


def toy_text(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """Return the toy target's own continuation, token by token."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, seed))
    return context[len(prompt) :]


class ToyEngine:
    """An engine that computes `next_token`, and checks that its caller follows the protocol.

    The hidden state of a row in any layer is (layer, position, token id). The logits of a scratch row are 1 at its next
    token, else 0. Scored rows have the values of `toy_scores`. Drafts are wrong at each WRONG_EVERY-th token.
    """

    num_tap_layers = 2
    is_helped = False
    overlaps = False
    jumps: tuple[int, ...] = ()
    takes_scratch = True
    scores_rows = True

    def __init__(self, info: ModelInfo | None = None, *, max_chain: int = 0) -> None:
        self.info = info or toy_info()
        self.max_chain = max_chain
        self.contexts: dict[int, list[int]] = {}  # session -> the tokens whose KV it holds
        self.num_rows: list[int] = []  # of each step
        self.busy_s = 0.0  # duration of all steps by the clock of a simulated world

    @property
    def free_slots(self) -> int:
        return self.info.kv_slots - sum(map(len, self.contexts.values()))

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        if session_id in self.contexts:
            raise EngineError("open twice")
        self.contexts[session_id] = []
        return 0

    def close(self, session_id: int) -> None:
        self.contexts.pop(session_id, None)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        check_asked(self, steps, tap)
        rows = sum(step.num_rows for step in steps)
        if rows > self.free_slots:
            raise EngineError("no slots")
        self.num_rows.append(rows)
        self.busy_s += self.step_times([rows])[0]
        hidden = _session_rows([_hidden(step, tap) for step in steps], tap.layers) if tap.layers else None
        asked = any(step.scratch.num_rows for step in steps)
        scratch = _session_rows([self._scratch_logits(step) for step in steps]) if asked else None
        judgements = [judgement for step in steps if (judgement := self._run(step)) is not None]
        scored = {i: toy_scores(step.start, step.scored) for i, step in enumerate(steps) if step.scored.num_rows}
        drafts = self._drafts(steps, judgements, tap.drafts) if tap.drafts > 0 else None
        return StepOutput(judgements, hidden, scratch, scored=scored, drafts=drafts)

    def _drafts(self, steps: Sequence[SessionStep], judgements: Sequence[Judgement], count: int) -> Int32Array:
        last = {judgement.session_id: int(judgement.token_ids[-1]) for judgement in judgements}
        found = np.full((len(steps), count), -1, np.int32)
        for i, step in enumerate(steps):
            if step.judged:
                text = [*self.contexts[step.session_id], last[step.session_id]]
                is_wrong = np.arange(len(text), len(text) + count) % WRONG_EVERY == 0
                found[i] = (np.array(toy_text(text, count, step.params.seed)) + is_wrong) % VOCAB
        return found

    def _scratch_logits(self, step: SessionStep) -> Float32Array:
        logits = np.zeros((step.scratch.num_rows, VOCAB), np.float32)
        token_ids = np.concatenate([step.tree.token_ids, step.scratch.token_ids]).tolist()
        parents = np.concatenate([step.tree.parents, step.scratch.parents]).tolist()
        for i, position in enumerate(step.scratch.positions.tolist()):
            row = step.tree.num_nodes + i
            before = token_ids[parents[row]] if parents[row] >= 0 else int(step.token_ids[-1])
            context = [0] * (position - 1) + [before, token_ids[row]]  # only the length and the end count
            logits[i, next_token(context, step.params.seed)] = 1
        return logits

    def _run(self, step: SessionStep) -> Judgement | None:
        context = self.contexts[step.session_id]
        assert step.start == len(context), "start is not the KV length"
        chain = np.arange(step.tree.num_nodes) - 1
        is_short = len(chain) <= self.max_chain
        assert not self.max_chain or (is_short and np.array_equal(step.tree.parents, chain)), "no chain, or too long"
        context.extend(step.token_ids.tolist())
        if not step.judged:
            assert step.tree.num_nodes == 0
            return None
        path = self._walk(step, context)
        tokens = [*step.tree.token_ids[path].tolist()]
        correction = next_token(context + tokens, step.params.seed)
        context.extend(tokens)
        return Judgement(step.session_id, tuple(path), np.array([*tokens, correction], np.int32))

    def _walk(self, step: SessionStep, context: list[int]) -> list[int]:
        path: list[int] = []
        said = list(context)
        while True:
            wanted, parent = next_token(said, step.params.seed), path[-1] if path else -1
            found = [
                i
                for i in range(step.tree.num_nodes)
                if step.tree.parents[i] == parent and step.tree.token_ids[i] == wanted
            ]
            if not found:
                return path
            path.append(found[0])
            said.append(wanted)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        return [0.005 + 0.0002 * size for size in sizes]

    def shutdown(self) -> None:
        pass


def toy_scores(start: int, scored: ScoredRows) -> Logprobs:
    """Return values for scored rows from a position on. They follow from position, token and rank."""
    positions, ranks = start + np.arange(scored.num_rows), np.arange(scored.num_top)
    own = -(positions + scored.token_ids / 100)
    top_ids = (scored.token_ids[:, None] + ranks) % VOCAB
    return Logprobs(own.astype(np.float32), top_ids.astype(np.int32), (own[:, None] - ranks).astype(np.float32))


def _hidden(step: SessionStep, tap: Tap) -> Float32Array:
    """Return [rows, 3 * layers]: the toy hidden states of a step that a tap requests."""
    positions = [
        *range(step.start, step.base_len),
        *(step.base_len + depth - 1 for depth in step.tree.depths().tolist()),
    ]
    token_ids = [*step.token_ids.tolist(), *step.tree.token_ids.tolist()]
    rows = [[part for layer in tap.layers for part in (layer, *row)] for row in zip(positions, token_ids, strict=True)]
    return np.array(rows, np.float32)[len(rows) - tap.num_rows(step) :]


def _session_rows(parts: list[Float32Array], layers: tuple[int, ...] = ()) -> SessionRows:
    return SessionRows(np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int32), layers)

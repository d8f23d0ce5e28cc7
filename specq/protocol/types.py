"""The values that all packages share: models, draft trees, steps, judgements.

Rule: they are frozen dataclasses of numbers and NumPy arrays. Their only behaviour is to derive counts. From specq,
this module imports only `arrays`, `bounds`, `params` and `versions`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import numpy as np

from specq.protocol import bounds
from specq.protocol.arrays import Float32Array, Int32Array, Int64Array, UInt16Array
from specq.protocol.params import SamplingParams
from specq.protocol.versions import OLDEST_VERSION, since, since_of

NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False
NO_WEIGHTS: UInt16Array = np.zeros(0, np.uint16)
NO_WEIGHTS.flags.writeable = False
NO_COUNTS: Float32Array = np.zeros(0, np.float32)
NO_COUNTS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the broker must know about a worker's model.

    - fingerprint: a hash of the weights and of everything else that a text depends on. Only models of equal
      fingerprint, dtype and arithmetic are assumed to give equal texts.
    - former_fingerprint: the fingerprint that older versions gave this model. Jobs that began under it can continue.
    - added_eos_ids: those of `eos_ids` that older versions did not treat as ends. Jobs that began under the former
      fingerprint continue past them.
    - arithmetic: the kernels in use. Different kernels round differently, which may decide a near-tie.
    - tokenizer_hash: a hash of vocabulary, merges and added tokens.
    - vocab_size: number of token ids that it takes. It may be padded beyond the tokenizer's `num_tokens`.
    """

    name: Annotated[str, bounds.NAME]
    fingerprint: Annotated[str, bounds.NAME]
    dtype: Annotated[str, bounds.NAME]
    engine: Annotated[str, bounds.NAME]
    vocab_size: Annotated[int, bounds.COUNT]
    num_tokens: Annotated[int, bounds.COUNT]
    eos_ids: Annotated[tuple[int, ...], bounds.EOS_IDS]
    max_length: Annotated[int, bounds.COUNT]
    tokenizer_hash: Annotated[str, bounds.NAME]
    kv_slots: Annotated[int, bounds.COUNT] = 0
    former_fingerprint: Annotated[str, bounds.NAME] = ""
    added_eos_ids: Annotated[tuple[int, ...], bounds.EOS_IDS] = since(6, ())
    arithmetic: Annotated[str, bounds.NAME] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return its fields for messages, without newer fields at their defaults."""
        values = {f: getattr(self, f.name) for f in fields(self)}
        return {f.name: value for f, value in values.items() if value != f.default or since_of(f) == OLDEST_VERSION}

    def of_before(self) -> ModelInfo:
        """Return it in the form that peers of the oldest version can read.

        With other end tokens it is another model to them. A job that began under the former fingerprint would end too
        early here.
        """
        return replace(self, added_eos_ids=(), former_fingerprint="") if self.added_eos_ids else self

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of token ids, from 0, that a prompt may use.

        A token id must be known to tokenizer and model. Either may have more than the other.
        """
        return min(self.num_tokens, self.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """The distribution of some siblings, drawn without replacement: ids i32[k], weights u16[k].

    See `DraftDistributions`.
    """

    ids: Int32Array
    weights: UInt16Array


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """The distributions of a tree's sampled nodes, for `probabilistic`: g distributions over k tokens each.

    - `ids` i32[g, k], `weights` u16[g, k]: probability = weight / sum of weights. Unused places hold id -1 and weight
      0.
    - `rows` i32[n]: the distribution that each node was drawn from. -1: a point mass, chosen and not drawn. Sampled
      siblings name one row and are in draw order. Each was drawn without the tokens of its earlier siblings.
    """

    ids: Int32Array
    weights: UInt16Array
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft nodes of one session, with parents before children.

    - `token_ids` i32[n].
    - `parents` i32[n]: index of the parent node. -1: a child of the committed context. parents[i] < i.
    - `scores` f32[n]: the drafter's log-probability given the parent. 0 if unknown.
    - `distributions`: None if all nodes are point masses.
    """

    token_ids: Int32Array
    parents: Int32Array
    scores: Float32Array
    distributions: DraftDistributions | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def depths(self) -> Int32Array:
        """Return i32[n]: 1 for children of the context, one more per generation."""
        depths = np.zeros(self.num_nodes, np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return depths


NO_TREE = Tree(NO_TOKENS, NO_TOKENS, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class ScratchRows:
    """Rows of a step that are not judged. Their logits are returned, and their KV is not kept.

    In the window of lookahead decoding, a row is a token of one trajectory. Its parent is the token before it.

    - `token_ids` i32[s].
    - `parents` i32[s]: a row sees the context, its parent and the parent's ancestors. -1: the context alone. Below the
      number n of the tree's nodes: that node. n + i: scratch row i, which comes before its children.
    - `positions` i32[s]: the position of each token in the context, at least the step's `base_len`. It may differ from
      the depth that the parents imply.
    """

    token_ids: Int32Array
    parents: Int32Array
    positions: Int32Array

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


NO_SCRATCH = ScratchRows(NO_TOKENS, NO_TOKENS, NO_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """The first rows of a step's tokens, whose log-probabilities are returned: those of a prompt.

    - `token_ids` i32[k]: the token that follows each of these rows in the context. k is at most the number of tokens.
    - `num_top`: number of likeliest tokens for each row.
    """

    token_ids: Int32Array
    num_top: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


NO_SCORED = ScoredRows(NO_TOKENS, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Bans:
    """`bad_token_ids`, prepared for a lookup at each row.

    A sequence is split before its last token. The tokens before it are its beginning. After this beginning the last
    token is banned.

    - `alone` i64[k], ascending: tokens that are banned everywhere.
    - `following`: last token of a beginning -> (beginning, i64[m] ascending: the tokens that are banned after it), ...
    """

    alone: Int64Array
    following: dict[int, list[tuple[list[int], Int64Array]]]


@dataclass(frozen=True, slots=True)
class History:
    """The judge's view of a session's past, if `SamplingParams.needs_history`.

    `specq.verifier.sessions.history` makes it.

    - `end_ids`: tokens that end the text: end-of-sequence unless ignored, and stop tokens.
    - `tail` i32[m]: the last tokens of the committed context, the step's included. As many as bad_token_ids need.
    - `token_ids` i32[k], ascending: the tokens that penalties change. These are the generated tokens, and with a
      repetition_penalty also those of the prompt.
    - `counts` f32[k]: how often each was generated.
    - `bans`: None without bad_token_ids.
    """

    prompt_len: int
    end_ids: tuple[int, ...] = ()
    tail: Int32Array = field(default_factory=lambda: NO_TOKENS)
    token_ids: Int32Array = field(default_factory=lambda: NO_TOKENS)
    counts: Float32Array = field(default_factory=lambda: NO_COUNTS)
    bans: Bans | None = None


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One session's share of a forward pass.

    - `token_ids` i32[m], m >= 1: committed tokens without KV yet, at positions start .. start + m - 1. One for a
      decoding session, more for a prefill chunk.
    - `tree`: nodes attached to the last of token_ids.
    - `judged`: False for a prefill chunk that does not reach the end of the context. It needs no logits.
    - `history`: present if `params.needs_history`.
    - `scratch`: rows behind the tree's, in a judged step.
    - `scored`: rows whose log-probabilities are returned, in any step.
    """

    session_id: int
    start: int
    token_ids: Int32Array
    params: SamplingParams
    tree: Tree = NO_TREE
    judged: bool = True
    history: History | None = None
    scratch: ScratchRows = NO_SCRATCH
    scored: ScoredRows = NO_SCORED

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + self.tree.num_nodes + self.scratch.num_rows

    @property
    def num_judged_rows(self) -> int:
        return 1 + self.tree.num_nodes if self.judged else 0

    @property
    def base_len(self) -> int:
        """Return the committed length after token_ids: the position of the step's first new token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The target's log-probabilities of tokens, from its logits before temperature, bias and penalties.

    - `tokens` f32[m]: of the emitted token, or of the prompt's.
    - `top_ids` i32[m, n], `top` f32[m, n]: of the n likeliest tokens, descending.
    """

    tokens: Float32Array
    top_ids: Int32Array
    top: Float32Array


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one session cannot continue. `retry`: another verifier may be able to."""

    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a strategy decided for one session.

    - `path`: indices into the step's tree of the accepted nodes, root to leaf.
    - `token_ids` i32[len(path) + 1]: the accepted tokens, then the correction or bonus token.
    - `logprobs`: present if `params.logprobs` requests them.
    - `fault`: set if the session could not be judged. Then path and tokens are empty.
    """

    session_id: int
    path: tuple[int, ...]
    token_ids: Int32Array
    logprobs: Logprobs | None = None
    fault: Fault | None = None

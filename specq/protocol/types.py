"""The plain values that every room shares: draft trees, steps, judgements.

Rule: frozen dataclasses of numbers and NumPy arrays, no behaviour beyond derived counts. Nothing here imports another
module of specq but `bounds`, `errors` and `params`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from specq.protocol import bounds
from specq.protocol.arrays import Float32Array, Int32Array, Int64Array, UInt16Array
from specq.protocol.params import SamplingParams

NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False
NO_WEIGHTS: UInt16Array = np.zeros(0, np.uint16)
NO_WEIGHTS.flags.writeable = False
NO_COUNTS: Float32Array = np.zeros(0, np.float32)
NO_COUNTS.flags.writeable = False

# How a completion ended; `None` while it runs.
FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker's model is, as far as matching, routing and limits need it.

    `fingerprint` hashes the weights and all that a text depends on besides (equal text is claimed only between equal
    fingerprints and dtypes); `former_fingerprint` is the same model's as older versions made it, by which jobs go on that began
    under one of these.
    `tokenizer_hash` hashes vocabulary, merges and added tokens. `vocab_size` counts the rows of the output head, which
    may be padded beyond the tokenizer's `num_tokens`.
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


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """What some siblings were drawn from, without replacement: ids i32[k], weights u16[k]; see `DraftLaws`."""

    ids: Int32Array
    weights: UInt16Array


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """What the nodes of a tree were sampled from, for `probabilistic`.

    ids        i32[g, k], weights u16[g, k]: laws, probability = weight / sum of weights; unused places hold id -1 and
               weight 0
    rows       i32[n]: the law that each node was drawn from; -1: a point mass, chosen and not drawn. Sampled siblings
               name one row and stand in draw order: each was drawn from it without its elder siblings' tokens
    """

    ids: Int32Array
    weights: UInt16Array
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft nodes of one session in an order in which parents come before children.

    token_ids  i32[n]
    parents    i32[n]: index of the parent node, -1 for a child of the committed context; parents[i] < i
    scores     f32[n]: the drafter's log-probability given the parent; 0 where unknown
    laws       None: all nodes are point masses
    """

    token_ids: Int32Array
    parents: Int32Array
    scores: Float32Array
    distributions: DraftDistributions | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def depths(self) -> Int32Array:
        """Return i32[n]: 1 for children of the context, one more a generation."""
        depths = np.zeros(self.num_nodes, np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return depths


NO_TREE = Tree(NO_TOKENS, NO_TOKENS, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Bans:
    """`bad_token_ids`, ready to be looked up at each row.

    alone      i64[k], ascending: tokens that are banned everywhere
    following  by the last token of a beginning: the beginnings that end in it, longest sequences split before their last
               token, and i64[m], ascending: the tokens that are banned after each
    """

    alone: Int64Array
    following: dict[int, list[tuple[list[int], Int64Array]]]


@dataclass(frozen=True, slots=True)
class History:
    """What judging a session needs of its past, where `SamplingParams.needs_history`; `specq.verifier.history` makes it.

    end_ids     tokens that end the text: end-of-sequence unless ignored, and stop tokens
    tail        i32[m]: the last tokens of the committed context, the step's included: as many as bad_token_ids look at
    token_ids   i32[k], ascending: the tokens that penalties change: those generated, and for a repetition_penalty those
                of the prompt; counts f32[k]: how often each was generated
    bans        where there are bad_token_ids
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

    token_ids   i32[m], m >= 1: committed tokens whose KV is not there yet, at positions start .. start + m - 1; one
                for a decoding session, more for a prefill chunk
    tree        nodes hanging from the last of token_ids
    judged      False for a prefill chunk that does not reach the end of the context: no logits are wanted
    history     needed where `params.needs_history`
    """

    session_id: int
    start: int
    token_ids: Int32Array
    params: SamplingParams
    tree: Tree = NO_TREE
    judged: bool = True
    history: History | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + self.tree.num_nodes

    @property
    def num_judged_rows(self) -> int:
        return 1 + self.tree.num_nodes if self.judged else 0

    @property
    def base_len(self) -> int:
        """The committed length after token_ids: the position that the step's first new token will take."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The target's log-probabilities at emitted tokens: of its plain logits, before temperature, bias and penalties.

    tokens f32[m]: of the emitted token; top_ids i32[m, n], top f32[m, n]: of the n likeliest tokens, descending
    """

    tokens: Float32Array
    top_ids: Int32Array
    top: Float32Array


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one session cannot go on; `retry`: another verifier may do better."""

    reason: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a strategy decided for one session.

    path        indices into the step's tree of the accepted nodes, root to leaf
    token_ids   i32[len(path) + 1]: the accepted tokens, then the correction or bonus token
    logprobs    where `params.logprobs` asks for them
    fault       set where the session could not be judged: then there is no path and no token
    """

    session_id: int
    path: tuple[int, ...]
    token_ids: Int32Array
    logprobs: Logprobs | None = None
    fault: Fault | None = None

"""A toy target and draft model, and all draws of a drafter with their probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.protocol import DraftDistributions, Float32Array, Float64Array, SamplingParams, SessionStep, Tree
from specq.testing import oracle
from specq.verification import ReadyTokenMasks, StepBatch

Tokens = tuple[int, ...]
Node = tuple[Tokens, bool]  # tokens from the root, and whether the last was drawn


@dataclass(frozen=True)
class DrawnChild:
    """A place in a draft's plan, fixed before any token is drawn."""

    is_sampled: bool = True
    children: tuple[DrawnChild, ...] = ()


Plan = tuple[DrawnChild, ...]
Member = tuple[DrawnChild, int, bool]  # of a sibling group: its place, its token, whether it was drawn


def sampled(*children: DrawnChild) -> DrawnChild:
    """Return a node whose token is drawn from the draft distribution."""
    return DrawnChild(True, children)


def point(*children: DrawnChild) -> DrawnChild:
    """Return a node whose token is chosen: a point mass."""
    return DrawnChild(False, children)


@dataclass
class ExactWorld:
    """A toy target and draft model: logits and integer distributions are random functions of the tokens so far.

    `allows`: the tokens that a grammar allows behind some tokens. None: there is no grammar.
    """

    entropy: int
    vocab: int = 3
    support: int = 3  # tokens in a draft distribution
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, strategy="probabilistic"))
    allows: Callable[[Tokens], Collection[int]] | None = None

    def logits(self, prefix: Tokens) -> Float32Array:
        """Return f32[vocab], the target's logits after these tokens."""
        return np.random.default_rng([self.entropy, 1, *prefix]).normal(0, 1.5, self.vocab).astype(np.float32)

    def target(self, prefix: Tokens) -> Float64Array:
        """Return f64[vocab], the distribution of the target's next token."""
        logits = self.logits(prefix)
        if self.allows is not None:
            logits[[token for token in range(self.vocab) if token not in self.allows(prefix)]] = -np.inf
        return oracle.distribution(logits, self.params)

    def batch(self, steps: Sequence[SessionStep], prefixes: Sequence[Sequence[Tokens]]) -> StepBatch:
        """Return steps with the masks of the grammar. `prefixes`: the tokens before each row of each session."""
        found = StepBatch.of(steps)
        if self.allows is not None:
            words = [np.array([[sum(1 << t for t in self.allows(row))] for row in own], np.int32) for own in prefixes]
            found.masks = ReadyTokenMasks(dict(zip(found.session_ids, words, strict=True)), {})
        return found

    def draft(self, prefix: Tokens) -> tuple[list[int], list[int]]:
        """Return a draft distribution as (ids, weights). Some weights are tiny."""
        rng = np.random.default_rng([self.entropy, 2, *prefix])
        ids = rng.permutation(self.vocab)[: self.support]
        return ids.tolist(), np.maximum(
            rng.integers(0, 65536, self.support) >> rng.integers(0, 8, self.support), 1
        ).tolist()

    def joint(self, length: int) -> dict[Tokens, float]:
        """Return {tokens: probability} of the target's next tokens."""
        return {
            tokens: float(np.prod([self.target(tokens[:i])[token] for i, token in enumerate(tokens)]))
            for tokens in itertools.product(range(self.vocab), repeat=length)
        }


def draw_siblings(
    world: ExactWorld, prefix: Tokens, plan: Plan, *, with_replacement: bool = False, upgraded: bool = False
) -> Iterator[tuple[float, list[Member]]]:
    """Yield (probability, [(child, token, is_sampled)]) over the draws of one group.

    Point masses take the target's likeliest remaining tokens. They may be chosen by content. With `upgraded` they are
    chosen first. If such a token is drawn afterwards, it becomes the sampled node and keeps the children.
    """
    ids, weights = world.draft(prefix)
    num_sampled = min(sum(child.is_sampled for child in plan), len(ids))
    for drawn in itertools.product(range(len(ids)), repeat=num_sampled):
        if len(set(drawn)) < num_sampled and not with_replacement:
            continue
        probability, left = 1.0, dict(enumerate(weights))
        for i in drawn:
            probability *= left[i] / sum(left.values())
            left = left if with_replacement else {j: w for j, w in left.items() if j != i}
        tokens = [ids[i] for i in dict.fromkeys(drawn)]  # duplicates are merged
        likeliest = [t for t in np.argsort(-world.target(prefix)).tolist() if upgraded or t not in tokens]
        sibling_group: list[Member] = []
        for child in plan:
            supply = tokens if child.is_sampled else likeliest
            if supply:
                sibling_group.append((child, supply.pop(0), child.is_sampled))
        yield probability, upgrade(sibling_group) if upgraded else sibling_group


def upgrade(sibling_group: list[Member]) -> list[Member]:
    """Merge point masses into sampled siblings with their tokens."""
    points = {token: child for child, token, is_sampled in sibling_group if not is_sampled}
    drawn = {token for _, token, is_sampled in sibling_group if is_sampled}
    return [
        (DrawnChild(is_sampled, child.children or points.get(token, child).children), token, is_sampled)
        for child, token, is_sampled in sibling_group
        if is_sampled or token not in drawn
    ]


def drafts(world: ExactWorld, plan: Plan, prefix: Tokens = (), **how: bool) -> Iterator[tuple[float, list[Node]]]:
    """Yield (probability, nodes) over all draws of a plan. A node is (tokens from the root, is_sampled)."""
    for probability, sibling_group in draw_siblings(world, prefix, plan, **how):
        below: list[list[tuple[float, list[Node]]]] = [
            list(drafts(world, child.children, (*prefix, token), **how)) if child.children else [(1.0, [])]
            for child, token, _ in sibling_group
        ]
        for choice in itertools.product(*below):
            nodes = [((*prefix, token), is_sampled) for _, token, is_sampled in sibling_group]
            yield (
                probability * float(np.prod([p for p, _ in choice])),
                nodes + [node for _, deeper in choice for node in deeper],
            )


@dataclass(frozen=True)
class DrawnDraft:
    """A drafted tree below `base`, the tokens committed so far.

    Nodes are (tokens from the start, is_sampled), with parents before children and siblings in draw order.
    """

    base: Tokens
    nodes: tuple[Node, ...]

    def tree(self, world: ExactWorld) -> Tree:
        """Return it in the form that engines receive."""
        index = {prefix: i for i, (prefix, _) in enumerate(self.nodes)} | {self.base: -1}
        sibling_groups = sorted({prefix[:-1] for prefix, is_sampled in self.nodes if is_sampled})
        distributions = [world.draft(prefix) for prefix in sibling_groups]
        rows = [sibling_groups.index(prefix[:-1]) if is_sampled else -1 for prefix, is_sampled in self.nodes]
        return Tree(
            np.array([prefix[-1] for prefix, _ in self.nodes], np.int32),
            np.array([index[prefix[:-1]] for prefix, _ in self.nodes], np.int32),
            np.zeros(len(self.nodes), np.float32),
            DraftDistributions(
                np.array([ids for ids, _ in distributions], np.int32).reshape(len(distributions), world.support),
                np.array([weights for _, weights in distributions], np.uint16).reshape(
                    len(distributions), world.support
                ),
                np.array(rows, np.int32),
            ),
        )

    def keep(self, is_kept: Callable[[Tokens], bool]) -> DrawnDraft:
        """Return it without the nodes for which is_kept(tokens from the start) is false, and their descendants."""
        depth = len(self.base)
        kept = [n for n in self.nodes if all(is_kept(n[0][:i]) for i in range(depth + 1, len(n[0]) + 1))]
        return DrawnDraft(self.base, tuple(kept))

    def ranks(self) -> dict[Tokens, int]:
        """Return {tokens from the start: place among the siblings, in draw order}."""
        sibling_groups: dict[Tokens, list[Tokens]] = {}
        for prefix, _ in self.nodes:
            sibling_groups.setdefault(prefix[:-1], []).append(prefix)
        return {prefix: rank for sibling_group in sibling_groups.values() for rank, prefix in enumerate(sibling_group)}

    def after(self, tokens: Sequence[int]) -> DrawnDraft:
        """Return the part that survives by content when these tokens are committed."""
        base = (*self.base, *tokens)
        below = [n for n in self.nodes if len(n[0]) > len(base) and n[0][: len(base)] == base]
        return DrawnDraft(base, tuple(below))

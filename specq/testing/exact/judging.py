"""The output of a strategy: the judge is a black box, and bisection finds where its outcome changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from specq.protocol import (
    BoolArray,
    Float64Array,
    Int64Array,
    Judgement,
    SamplingParams,
    SessionStep,
    Tree,
    UInt64Array,
)
from specq.testing.exact.drawing import DrawnDraft, ExactWorld, Plan, Tokens, drafts
from specq.verification.judge import judge

DIGITS = 32
NEVER = 1 - 1e-14

Case = tuple[int, float, Float64Array]  # a tree, the probability of these acceptances, their uniforms
Choice = Callable[[dict[Tokens, int], Tokens], bool]  # by the places among siblings, and the tokens of one node
Key = TypeVar("Key", bound=Hashable)


class Scripted:
    """Given draws: `accepts` for the packed nodes, `residuals` by session, whose number is its seed."""

    def __init__(self, accepts: Float64Array, residuals: Float64Array) -> None:
        self.accepts, self.residuals = accepts, residuals

    def accept(self, seeds: UInt64Array, positions: Int64Array, token_ids: Int64Array) -> Float64Array:
        return self.accepts

    def residual(self, seeds: UInt64Array, positions: Int64Array) -> Float64Array:
        return self.residuals[seeds.astype(np.int64)]


class JudgedBatch:
    """Many sessions over drafted trees: `of[s]` is the tree of session s."""

    def __init__(self, world: ExactWorld, drafted: Sequence[DrawnDraft], of: Sequence[int]) -> None:
        logits = [np.stack([world.logits(p) for p in [d.base, *(p for p, _ in d.nodes)]]) for d in drafted]
        trees = [d.tree(world) for d in drafted]
        self.logits = torch.from_numpy(np.concatenate([logits[t] for t in of]))
        params = [SamplingParams(**{**world.params.to_dict(), "seed": s}) for s in range(len(of))]
        steps = [SessionStep(s, 0, np.zeros(1, np.int32), params[s], trees[t]) for s, t in enumerate(of)]
        self.steps = world.batch(steps, [[drafted[t].base, *(p for p, _ in drafted[t].nodes)] for t in of])

    def run(self, accepts: Sequence[Float64Array], residuals: Float64Array) -> Sequence[Judgement]:
        """Judge with these uniforms: those of each session's nodes, and one for each session's residual."""
        return judge(self.steps, self.logits, Scripted(np.concatenate([np.zeros(0), *accepts]), residuals))


def bisect(num: int, is_below: Callable[[Float64Array], BoolArray], digits: int) -> Float64Array:
    """Return f64[num]: the point in [0, 1] where each monotone function stops being true, to `digits` binary digits."""
    low, high = np.zeros(num), np.ones(num)
    for _ in range(digits):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def lineage(tree: Tree, node: int) -> list[int]:
    """Return a node and all its ancestors."""
    found = []
    while node >= 0:
        found.append(node)
        node = int(tree.parents[node])
    return found


def chances(world: ExactWorld, drafted: Sequence[DrawnDraft], digits: int) -> list[Float64Array]:
    """Return for each tree f64[n]: the uniform below which each node is accepted, if it is reached."""
    trees = [d.tree(world) for d in drafted]
    of = [(t, i) for t, tree in enumerate(trees) for i in range(tree.num_nodes)]
    if not of:
        return [np.zeros(0)] * len(trees)
    batch = JudgedBatch(world, drafted, [t for t, _ in of])
    scripts = []
    for t, i in of:
        accepts = np.full(trees[t].num_nodes, NEVER)
        accepts[lineage(trees[t], i)] = 0
        scripts.append(accepts)

    def is_accepted(middle: Float64Array) -> BoolArray:
        for (_, i), accepts, u in zip(of, scripts, middle, strict=True):
            accepts[i] = u
        outcomes = batch.run(scripts, np.full(len(of), 0.5))
        return np.array([i in outcome.path for (_, i), outcome in zip(of, outcomes, strict=True)], bool)

    found = iter(bisect(len(of), is_accepted, digits).tolist())
    return [np.array([next(found) for _ in range(tree.num_nodes)]) for tree in trees]


def emitted(world: ExactWorld, drafted: Sequence[DrawnDraft], digits: int) -> list[list[tuple[float, Tokens]]]:
    """Return for each tree a list of (probability, tokens): the exact distribution of one step's output."""
    cases: list[Case] = []  # (tree, probability of these acceptances, uniforms)
    for t, accepting in enumerate(chances(world, drafted, digits)):
        for bits in itertools.product((True, False), repeat=len(accepting)):
            probability = float(np.prod(np.where(bits, accepting, 1 - accepting)))
            if probability > 1e-11:
                cases.append((t, probability, np.where(bits, accepting / 2, (1 + accepting) / 2)))
    outcomes = JudgedBatch(world, drafted, [t for t, _, _ in cases]).run(
        [uniforms for _, _, uniforms in cases], np.full(len(cases), 0.5)
    )
    stops: dict[tuple[int, tuple[int, ...]], int] = {}  # (tree, path) -> one of its cases
    for i, ((t, _, _), outcome) in enumerate(zip(cases, outcomes, strict=True)):
        stops.setdefault((t, outcome.path), i)
    distributions = dict(
        zip(stops, residual_distributions(world, drafted, [cases[i] for i in stops.values()], digits), strict=True)
    )
    found: list[list[tuple[float, Tokens]]] = [[] for _ in drafted]
    for (t, probability, _), outcome in zip(cases, outcomes, strict=True):
        tokens, distribution = outcome.token_ids[:-1].tolist(), distributions[t, outcome.path]
        found[t] += [(probability * distribution[v], (*tokens, v)) for v in range(world.vocab)]
    return found


def residual_distributions(
    world: ExactWorld, drafted: Sequence[DrawnDraft], cases: Sequence[Case], digits: int
) -> Float64Array:
    """Return f64[cases, vocab]: the distribution of the last token, in each case."""
    edges = [(case, v) for case in range(len(cases)) for v in range(world.vocab - 1)]
    batch = JudgedBatch(world, drafted, [cases[case][0] for case, _ in edges])
    scripts = [cases[case][2] for case, _ in edges]

    def is_at_most(middle: Float64Array) -> BoolArray:
        outcomes = batch.run(scripts, middle)
        return np.array([o.token_ids[-1] <= v for o, (_, v) in zip(outcomes, edges, strict=True)])

    below = bisect(len(edges), is_at_most, digits).reshape(len(cases), -1)
    return np.diff(below, axis=1, prepend=0, append=1)


def step(
    world: ExactWorld, weighted: Mapping[tuple[Tokens, DrawnDraft, DrawnDraft], float], digits: int
) -> dict[tuple[Tokens, DrawnDraft], float]:
    """Return {(tokens so far, the surviving draft): probability}, after one step that verifies a part of each tree.

    weighted: {(tokens so far, the draft, its verified part): probability}.
    """
    distribution: dict[tuple[Tokens, DrawnDraft], float] = {}
    outcomes = emitted(world, [part for _, _, part in weighted], digits)
    for ((tokens, drafted, _), probability), found in zip(weighted.items(), outcomes, strict=True):
        for chance, said in found:
            key = (*tokens, *said), drafted.after(said)
            distribution[key] = distribution.get(key, 0.0) + probability * chance
    return distribution


def joint_distribution(
    world: ExactWorld, plan: Plan, length: int, *, first: Choice | None = None, digits: int = DIGITS, **how: Any
) -> dict[Tokens, float]:
    """Return {tokens: probability} of the first `length` tokens under speculation.

    `cut(world, prefix)` drops drafted nodes for good. With `first(ranks, prefix)`, step 1 verifies only the nodes for
    which it is true. Step 2 then verifies all survivors.
    """
    distribution = step(world, planned(world, plan, first=first, **how), digits)
    if first is not None:
        going_on = {(tokens, left, left): p for (tokens, left), p in distribution.items() if len(tokens) < length}
        done = {key: p for key, p in distribution.items() if len(key[0]) >= length}
        distribution = _sum([*done.items(), *step(world, going_on, digits).items()])
    return completed(world, distribution, length)


def planned(
    world: ExactWorld,
    plan: Plan,
    *,
    first: Choice | None,
    cut: Callable[[ExactWorld, Tokens], bool] | None = None,
    **how: bool,
) -> dict[tuple[Tokens, DrawnDraft, DrawnDraft], float]:
    """Return {(no tokens, the draft, the part that is verified first): probability}."""
    weighted: dict[tuple[Tokens, DrawnDraft, DrawnDraft], float] = {}
    for probability, nodes in drafts(world, plan, (), **how):
        drafted = DrawnDraft((), tuple(nodes))
        drafted = drafted if cut is None else drafted.keep(lambda prefix: not cut(world, prefix))
        part = drafted if first is None else drafted.keep(partial(first, drafted.ranks()))
        weighted[(), drafted, part] = weighted.get(((), drafted, part), 0.0) + probability
    return weighted


def completed(
    world: ExactWorld, distribution: Mapping[tuple[Tokens, DrawnDraft], float], length: int
) -> dict[Tokens, float]:
    """Return {tokens: probability} of `length` tokens. The target completes shorter outputs."""
    total = dict.fromkeys(itertools.product(range(world.vocab), repeat=length), 0.0)
    for (said, _), probability in distribution.items():
        tokens = said[:length]
        for rest in itertools.product(range(world.vocab), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            completion = np.prod([world.target(whole[:i])[whole[i]] for i in range(len(tokens), length)])
            total[whole] += probability * float(completion)
    return total


def _sum(items: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    total: dict[Key, float] = {}
    for key, probability in items:
        total[key] = total.get(key, 0.0) + probability
    return total


def error(world: ExactWorld, plan: Plan, length: int, **how: Any) -> float:
    """Return the largest difference between the output distribution and the target's."""
    actual, expected = joint_distribution(world, plan, length, **how), world.joint(length)
    return max(abs(actual[tokens] - expected[tokens]) for tokens in expected)

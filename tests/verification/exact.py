"""The exact distribution of what is emitted: enumerates a drafter's draws and integrates over the judge's uniforms.

The judge is a black box: a function from uniforms to tokens. Where its outcome changes is found by bisection, for each
node's uniform and for the residual's, all at once in one batch of many sessions. What one step, or two, leave unsaid is
completed with the target's own distribution, as later steps would; the joint distribution of the first tokens must then
be the target's.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from specq.protocol.params import SamplingParams
from specq.protocol.types import DraftDistributions, SessionStep, Tree
from specq.verification.judge import judge
from tests.verification import oracle

DIGITS = 32
NEVER = 1 - 1e-14


@dataclass(frozen=True)
class Child:
    """A place in a draft's plan, fixed before any token is drawn."""

    is_sampled: bool = True
    children: tuple["Child", ...] = ()


def sampled(*children):
    return Child(True, children)


def point(*children):
    return Child(False, children)


@dataclass
class World:
    """A toy target and draft model: logits and integer distributions are random functions of the tokens so far."""

    entropy: int
    vocab: int = 3
    support: int = 3  # tokens in a draft distribution
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, strategy="probabilistic"))

    def logits(self, prefix):
        return np.random.default_rng([self.entropy, 1, *prefix]).normal(0, 1.5, self.vocab).astype(np.float32)

    def target(self, prefix):
        return oracle.distribution(self.logits(prefix), self.params)

    def draft(self, prefix):
        """A distribution as (ids, weights); some weights are tiny."""
        rng = np.random.default_rng([self.entropy, 2, *prefix])
        ids = rng.permutation(self.vocab)[: self.support]
        return ids.tolist(), np.maximum(
            rng.integers(0, 65536, self.support) >> rng.integers(0, 8, self.support), 1
        ).tolist()

    def joint(self, length):
        """{tokens: probability} of the target's next tokens."""
        return {
            tokens: float(np.prod([self.target(tokens[:i])[token] for i, token in enumerate(tokens)]))
            for tokens in itertools.product(range(self.vocab), repeat=length)
        }


def draw_siblings(world, prefix, plan, *, with_replacement=False, upgraded=False):
    """Yield (probability, [(child, token, is_sampled)]) over the draws of one group; point masses take the target's
    likeliest tokens that are left: a choice by content, which they are allowed. With `upgraded` they were chosen first, and
    one whose token is drawn afterwards becomes the sampled node: its children hang from that."""
    ids, weights = world.draft(prefix)
    num_sampled = min(sum(child.is_sampled for child in plan), len(ids))
    for drawn in itertools.product(range(len(ids)), repeat=num_sampled):
        if len(set(drawn)) < num_sampled and not with_replacement:
            continue
        probability, left = 1.0, dict(enumerate(weights))
        for i in drawn:
            probability *= left[i] / sum(left.values())
            left = left if with_replacement else {j: w for j, w in left.items() if j != i}
        tokens = [ids[i] for i in dict.fromkeys(drawn)]  # duplicates merged, where there are any
        likeliest = [t for t in np.argsort(-world.target(prefix)).tolist() if upgraded or t not in tokens]
        sibling_group = []
        for child in plan:
            supply = tokens if child.is_sampled else likeliest
            if supply:
                sibling_group.append((child, supply.pop(0), child.is_sampled))
        yield probability, upgrade(sibling_group) if upgraded else sibling_group


def upgrade(sibling_group):
    """Merge point masses into sampled siblings with their tokens."""
    points = {token: child for child, token, is_sampled in sibling_group if not is_sampled}
    drawn = {token for _, token, is_sampled in sibling_group if is_sampled}
    return [
        (Child(is_sampled, child.children or points.get(token, child).children), token, is_sampled)
        for child, token, is_sampled in sibling_group
        if is_sampled or token not in drawn
    ]


def drafts(world, plan, prefix=(), **how):
    """Yield (probability, nodes) over all draws of a plan; a node is (tokens from the root, is_sampled)."""
    for probability, sibling_group in draw_siblings(world, prefix, plan, **how):
        below = [
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
class Drafted:
    """A drafted tree that hangs from `base`, the tokens committed so far; nodes are (tokens from the start, is_sampled),
    parents before children and siblings in draw order."""

    base: tuple[int, ...]
    nodes: tuple[tuple[tuple[int, ...], bool], ...]

    def tree(self, world):
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

    def keep(self, is_kept):
        """Without the nodes (and what hangs from them) for which is_kept(tokens from the start) is false."""
        depth = len(self.base)
        kept = [n for n in self.nodes if all(is_kept(n[0][:i]) for i in range(depth + 1, len(n[0]) + 1))]
        return Drafted(self.base, tuple(kept))

    def ranks(self):
        """{tokens from the start: place among the siblings, in draw order}."""
        sibling_groups = {}
        for prefix, _ in self.nodes:
            sibling_groups.setdefault(prefix[:-1], []).append(prefix)
        return {prefix: rank for sibling_group in sibling_groups.values() for rank, prefix in enumerate(sibling_group)}

    def after(self, tokens):
        """What survives by content when these tokens are committed."""
        base = (*self.base, *tokens)
        below = [n for n in self.nodes if len(n[0]) > len(base) and n[0][: len(base)] == base]
        return Drafted(base, tuple(below))


class Scripted:
    """Draws that are given: `accepts` for the packed nodes, `residuals` by session, whose number is its seed."""

    def __init__(self, accepts, residuals):
        self.accepts, self.residuals = accepts, residuals

    def accept(self, seeds, positions, token_ids):
        return self.accepts

    def residual(self, seeds, positions):
        return self.residuals[seeds.astype(np.int64)]


class Batch:
    """Many sessions over drafted trees: `of[s]` is the tree of session s."""

    def __init__(self, world, drafted, of):
        logits = [np.stack([world.logits(p) for p in [d.base, *(p for p, _ in d.nodes)]]) for d in drafted]
        trees = [d.tree(world) for d in drafted]
        self.logits = torch.from_numpy(np.concatenate([logits[t] for t in of]))
        params = [SamplingParams(**{**world.params.to_dict(), "seed": s}) for s in range(len(of))]
        self.steps = [SessionStep(s, 0, np.zeros(1, np.int32), params[s], trees[t]) for s, t in enumerate(of)]

    def run(self, accepts, residuals):
        return judge(self.steps, self.logits, Scripted(np.concatenate([np.zeros(0), *accepts]), residuals))


def bisect(num, is_below, digits):
    """Return f64[num]: where each monotone function of [0, 1] stops being true, to so many binary digits."""
    low, high = np.zeros(num), np.ones(num)
    for _ in range(digits):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def lineage(tree, node):
    found = []
    while node >= 0:
        found.append(node)
        node = int(tree.parents[node])
    return found


def chances(world, drafted, digits):
    """For each tree f64[n]: the uniform below which each node is accepted, where it is reached."""
    trees = [d.tree(world) for d in drafted]
    of = [(t, i) for t, tree in enumerate(trees) for i in range(tree.num_nodes)]
    if not of:
        return [np.zeros(0)] * len(trees)
    batch = Batch(world, drafted, [t for t, _ in of])
    scripts = []
    for t, i in of:
        accepts = np.full(trees[t].num_nodes, NEVER)
        accepts[lineage(trees[t], i)] = 0
        scripts.append(accepts)

    def is_accepted(middle):
        for (_, i), accepts, u in zip(of, scripts, middle, strict=True):
            accepts[i] = u
        outcomes = batch.run(scripts, np.full(len(of), 0.5))
        return np.array([i in outcome.path for (_, i), outcome in zip(of, outcomes, strict=True)], bool)

    found = iter(bisect(len(of), is_accepted, digits).tolist())
    return [np.array([next(found) for _ in range(tree.num_nodes)]) for tree in trees]


def emitted(world, drafted, digits):
    """For each tree a list of (probability, tokens): the exact distribution of what one step emits."""
    cases = []  # (tree, probability of these acceptances, uniforms)
    for t, accepting in enumerate(chances(world, drafted, digits)):
        for bits in itertools.product((True, False), repeat=len(accepting)):
            probability = float(np.prod(np.where(bits, accepting, 1 - accepting)))
            if probability > 1e-11:
                cases.append((t, probability, np.where(bits, accepting / 2, (1 + accepting) / 2)))
    outcomes = Batch(world, drafted, [t for t, _, _ in cases]).run(
        [uniforms for _, _, uniforms in cases], np.full(len(cases), 0.5)
    )
    stops = {}  # (tree, path) -> one of its cases
    for i, ((t, _, _), outcome) in enumerate(zip(cases, outcomes, strict=True)):
        stops.setdefault((t, outcome.path), i)
    distributions = dict(
        zip(stops, residual_distributions(world, drafted, [cases[i] for i in stops.values()], digits), strict=True)
    )
    found = [[] for _ in drafted]
    for (t, probability, _), outcome in zip(cases, outcomes, strict=True):
        tokens, distribution = outcome.token_ids[:-1].tolist(), distributions[t, outcome.path]
        found[t] += [(probability * distribution[v], (*tokens, v)) for v in range(world.vocab)]
    return found


def residual_distributions(world, drafted, cases, digits):
    """f64[cases, vocab]: the distribution of the last token, in each case."""
    edges = [(case, v) for case in range(len(cases)) for v in range(world.vocab - 1)]
    batch = Batch(world, drafted, [cases[case][0] for case, _ in edges])
    scripts = [cases[case][2] for case, _ in edges]

    def is_at_most(middle):
        outcomes = batch.run(scripts, middle)
        return np.array([o.token_ids[-1] <= v for o, (_, v) in zip(outcomes, edges, strict=True)])

    below = bisect(len(edges), is_at_most, digits).reshape(len(cases), -1)
    return np.diff(below, axis=1, prepend=0, append=1)


def step(world, weighted, digits):
    """{(tokens so far, Drafted that survives by content): probability}, after one step that verifies a part of each tree;
    weighted: {(tokens so far, Drafted, the part of it that is verified): probability}."""
    distribution = {}
    outcomes = emitted(world, [part for _, _, part in weighted], digits)
    for ((tokens, drafted, _), probability), found in zip(weighted.items(), outcomes, strict=True):
        for chance, said in found:
            key = (*tokens, *said), drafted.after(said)
            distribution[key] = distribution.get(key, 0.0) + probability * chance
    return distribution


def joint_distribution(world, plan, length, *, cut=None, first=None, digits=DIGITS, **how):
    """{tokens: probability} of the first `length` tokens under speculation. `cut(world, prefix)` drops drafted nodes for
    good. With `first(ranks, prefix)` step 1 verifies only the nodes for which it is true, and step 2 all that survives."""
    weighted = {}
    for probability, nodes in drafts(world, plan, **how):
        drafted = Drafted((), tuple(nodes))
        drafted = drafted if cut is None else drafted.keep(lambda prefix: not cut(world, prefix))
        ranks = drafted.ranks()
        part = drafted if first is None else drafted.keep(lambda prefix, ranks=ranks: first(ranks, prefix))
        weighted[(), drafted, part] = weighted.get(((), drafted, part), 0.0) + probability
    distribution = step(world, weighted, digits)
    if first is not None:
        going_on = {(tokens, left, left): p for (tokens, left), p in distribution.items() if len(tokens) < length}
        done = {key: p for key, p in distribution.items() if len(key[0]) >= length}
        distribution = _sum([*done.items(), *step(world, going_on, digits).items()])
    total = dict.fromkeys(itertools.product(range(world.vocab), repeat=length), 0.0)
    for (said, _), probability in distribution.items():
        tokens = said[:length]
        for rest in itertools.product(range(world.vocab), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            completion = np.prod([world.target(whole[:i])[whole[i]] for i in range(len(tokens), length)])
            total[whole] += probability * float(completion)
    return total


def _sum(items):
    total = {}
    for key, probability in items:
        total[key] = total.get(key, 0.0) + probability
    return total


def error(world, plan, length, **how):
    """The largest difference between the distribution of what is emitted and the target's."""
    actual, expected = joint_distribution(world, plan, length, **how), world.joint(length)
    return max(abs(actual[tokens] - expected[tokens]) for tokens in expected)

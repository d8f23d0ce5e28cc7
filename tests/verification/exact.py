"""The exact law of what is emitted, by enumeration over a drafter's draws and integration over the judge's uniforms.

The judge is a black box: a function from uniforms to tokens. Where its outcome changes is found by bisection, for each
node's uniform and for the residual's, all at once in one batch of many sessions. What a round leaves unsaid is completed
with the target's own law, as later rounds would; the joint law of the first tokens must then be the target's.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

from specq.params import SamplingParams
from specq.types import DraftLaws, SessionStep, Tree
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
    """A toy target and draft model: logits and integer laws are random functions of the tokens so far."""

    entropy: int
    vocab: int = 3
    support: int = 3  # tokens in a draft law
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, strategy="probabilistic"))

    def logits(self, prefix):
        return np.random.default_rng([self.entropy, 1, *prefix]).normal(0, 1.5, self.vocab).astype(np.float32)

    def target(self, prefix):
        return oracle.law(self.logits(prefix), self.params)

    def draft(self, prefix):
        """A law as (ids, weights); some weights are tiny."""
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


def draw_siblings(world, prefix, plan, *, with_replacement=False):
    """Yield (probability, [(child, token, is_sampled)]) over the draws of one family; point masses take the target's
    likeliest tokens that are left: a choice by content, which they are allowed."""
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
        likeliest = [t for t in np.argsort(-world.target(prefix)).tolist() if t not in tokens]
        family = []
        for child in plan:
            supply = tokens if child.is_sampled else likeliest
            if supply:
                family.append((child, supply.pop(0), child.is_sampled))
        yield probability, family


def drafts(world, plan, prefix=(), **how):
    """Yield (probability, nodes) over all draws of a plan; a node is (tokens from the root, is_sampled)."""
    for probability, family in draw_siblings(world, prefix, plan, **how):
        below = [
            list(drafts(world, child.children, (*prefix, token), **how)) if child.children else [(1.0, [])]
            for child, token, _ in family
        ]
        for choice in itertools.product(*below):
            nodes = [((*prefix, token), is_sampled) for _, token, is_sampled in family]
            yield (
                probability * float(np.prod([p for p, _ in choice])),
                nodes + [node for _, deeper in choice for node in deeper],
            )


def tree_of(world, nodes):
    """Build the Tree; nodes come with parents before children and siblings in draw order."""
    index = {prefix: i for i, (prefix, _) in enumerate(nodes)} | {(): -1}
    families = sorted({prefix[:-1] for prefix, is_sampled in nodes if is_sampled})
    laws = [world.draft(prefix) for prefix in families]
    return Tree(
        np.array([prefix[-1] for prefix, _ in nodes], np.int32),
        np.array([index[prefix[:-1]] for prefix, _ in nodes], np.int32),
        np.zeros(len(nodes), np.float32),
        DraftLaws(
            np.array([ids for ids, _ in laws], np.int32).reshape(len(laws), world.support),
            np.array([weights for _, weights in laws], np.uint16).reshape(len(laws), world.support),
            np.array([families.index(p[:-1]) if is_sampled else -1 for p, is_sampled in nodes], np.int32),
        ),
    )


class Scripted:
    """Draws that are given: `accepts` for the packed nodes, `residuals` by session, whose number is its seed."""

    def __init__(self, accepts, residuals):
        self.accepts, self.residuals = accepts, residuals

    def accept(self, seeds, positions, token_ids):
        return self.accepts

    def residual(self, seeds, positions):
        return self.residuals[np.asarray(seeds)]


class Batch:
    """Many sessions over drafted trees: `of[s]` is the tree of session s."""

    def __init__(self, world, trees, of):
        logits = [np.stack([world.logits(p) for p in [(), *(p for p, _ in nodes)]]) for nodes, _ in trees]
        self.logits = torch.from_numpy(np.concatenate([logits[t] for t in of]))
        params = [SamplingParams(**{**world.params.to_dict(), "seed": s}) for s in range(len(of))]
        self.steps = [SessionStep(s, 0, np.zeros(1, np.int32), params[s], trees[t][1]) for s, t in enumerate(of)]

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


def chances(world, trees, digits):
    """For each tree f64[n]: the uniform below which each node is accepted, where it is reached."""
    of = [(t, i) for t, (_, tree) in enumerate(trees) for i in range(tree.num_nodes)]
    if not of:
        return [np.zeros(0)] * len(trees)
    batch = Batch(world, trees, [t for t, _ in of])
    scripts = []
    for t, i in of:
        accepts = np.full(trees[t][1].num_nodes, NEVER)
        accepts[lineage(trees[t][1], i)] = 0
        scripts.append(accepts)

    def is_accepted(middle):
        for (_, i), accepts, u in zip(of, scripts, middle, strict=True):
            accepts[i] = u
        outcomes = batch.run(scripts, np.full(len(of), 0.5))
        return np.array([i in outcome.path for (_, i), outcome in zip(of, outcomes, strict=True)], bool)

    found = iter(bisect(len(of), is_accepted, digits).tolist())
    return [np.array([next(found) for _ in range(tree.num_nodes)]) for _, tree in trees]


def emitted(world, trees, digits):
    """For each tree a list of (probability, tokens): the exact law of what one round emits."""
    cases = []  # (tree, probability of these acceptances, uniforms)
    for t, accepting in enumerate(chances(world, trees, digits)):
        for bits in itertools.product((True, False), repeat=len(accepting)):
            probability = float(np.prod(np.where(bits, accepting, 1 - accepting)))
            if probability > 1e-11:
                cases.append((t, probability, np.where(bits, accepting / 2, (1 + accepting) / 2)))
    paths = [o.path for o in Batch(world, trees, [t for t, _, _ in cases]).run(
        [uniforms for _, _, uniforms in cases], np.full(len(cases), 0.5))]  # fmt: skip
    stops = {}  # (tree, path) -> one of its cases
    for i, ((t, _, _), path) in enumerate(zip(cases, paths, strict=True)):
        stops.setdefault((t, path), i)
    laws = dict(zip(stops, residual_laws(world, trees, [cases[i] for i in stops.values()], digits), strict=True))
    found = [[] for _ in trees]
    for (t, probability, _), path in zip(cases, paths, strict=True):
        tokens, law = trees[t][1].token_ids[list(path)].tolist(), laws[t, path]
        found[t] += [(probability * law[v], (*tokens, v)) for v in range(world.vocab)]
    return found


def residual_laws(world, trees, cases, digits):
    """f64[cases, vocab]: the law of the last token, in each case."""
    edges = [(case, v) for case in range(len(cases)) for v in range(world.vocab - 1)]
    batch = Batch(world, trees, [cases[case][0] for case, _ in edges])
    scripts = [cases[case][2] for case, _ in edges]

    def is_at_most(middle):
        outcomes = batch.run(scripts, middle)
        return np.array([o.token_ids[-1] <= v for o, (_, v) in zip(outcomes, edges, strict=True)])

    below = bisect(len(edges), is_at_most, digits).reshape(len(cases), -1)
    return np.diff(below, axis=1, prepend=0, append=1)


def joint_law(world, plan, length, *, cut=None, digits=DIGITS, **how):
    """{tokens: probability} of the first `length` tokens under speculation; `cut(world, prefix)` drops drafted nodes."""
    drafted = list(drafts(world, plan, **how))
    if cut is not None:
        drafted = [(p, [n for n in nodes if not any(cut(world, n[0][: i + 1]) for i in range(len(n[0])))])
                   for p, nodes in drafted]  # fmt: skip
    trees = [(nodes, tree_of(world, nodes)) for _, nodes in drafted]
    total = dict.fromkeys(itertools.product(range(world.vocab), repeat=length), 0.0)
    for (probability, _), outcomes in zip(drafted, emitted(world, trees, digits), strict=True):
        for chance, tokens in outcomes:
            for rest in itertools.product(range(world.vocab), repeat=length - len(tokens)):
                whole = (*tokens, *rest)
                completion = np.prod([world.target(whole[:i])[whole[i]] for i in range(len(tokens), length)])
                total[whole] += probability * chance * float(completion)
    return total


def error(world, plan, length, **how):
    """The largest difference between the law of what is emitted and the target's."""
    actual, expected = joint_law(world, plan, length, **how), world.joint(length)
    return max(abs(actual[tokens] - expected[tokens]) for tokens in expected)

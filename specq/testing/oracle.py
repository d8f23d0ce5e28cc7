"""The naive oracle: one session, one row, one token at a time, in plain Python.

It shares no code with the tested code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from specq.protocol import BoolArray, Float32Array, Float64Array, SamplingParams, SessionStep, Tree

_MASK = 2**32 - 1
_GUMBEL, _ACCEPT, _RESIDUAL = 1, 2, 3  # domains of the hash

Outcome = tuple[tuple[int, ...], list[int]]  # the accepted path, and the emitted tokens
Bars = Callable[[Float32Array, SamplingParams], tuple[Float64Array, float]]  # of a row: its distribution, and its bar


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def hash32(domain: int, seed: int, position: int, token: int) -> int:
    """Return the hash of `specq.verification.noise`, in Python integers."""
    mixed = splitmix((splitmix(seed ^ (domain * 0x9E3779B97F4A7C15 % 2**64)) + position) % 2**64)
    key0, key1 = mixed & _MASK, mixed >> 32
    x = (token * 0x9E3779B1 + key0) & _MASK
    x = ((x ^ (x >> 15)) * 0x7FEB352D) & _MASK
    x = (x + key1) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    x ^= x >> 16
    return x ^ 2**31  # held in int32 as h - 2**31


def uniform(domain: int, seed: int, position: int, token: int) -> float:
    return (hash32(domain, seed, position, token) + 0.5) / 2**32


def gumbel(domain: int, seed: int, position: int, token: int) -> np.float32:
    return np.float32(-math.log(-math.log1p(-uniform(domain, seed, position, token))))


def scaled(row: Float32Array, params: SamplingParams) -> Float32Array:
    """Return f32[vocab]: (l - max l) / T."""
    row = np.asarray(row, np.float32)
    scaled: Float32Array = (row - row.max()) / np.float32(params.temperature)
    return scaled


def kept(row: Float32Array, params: SamplingParams) -> BoolArray:
    """Return bool[vocab]: the tokens that top-k, top-p and min-p keep, ties included."""
    s = scaled(row, params)
    order = sorted(range(len(s)), key=lambda t: -s[t])
    keep = np.ones(len(s), bool)
    if 0 < params.top_k < len(s):
        keep &= s >= s[order[params.top_k - 1]]
    if params.top_p < 1:
        mass = {t: float(np.exp(s[t])) for t in order if keep[t]}
        total, reached = sum(mass.values()), 0.0
        for t, weight in mass.items():
            reached += weight
            if reached >= params.top_p * total:
                keep &= s >= s[t]
                break
    if params.min_p > 0:
        keep &= s >= np.log(np.float32(params.min_p))
    return keep


def distribution(row: Float32Array, params: SamplingParams) -> Float64Array:
    """Return f64[vocab]: the distribution that the row's token is drawn from."""
    if params.temperature == 0:
        weights = np.eye(len(row))[int(np.argmax(row))]
    else:
        weights = np.where(kept(row, params), np.exp(scaled(row, params).astype(np.float64)), 0)
    probs: Float64Array = weights / weights.sum()
    return probs


def own_token(row: Float32Array, params: SamplingParams, position: int) -> int:
    """Return the target's own token under `deterministic`."""
    if params.temperature == 0:
        return int(np.argmax(row))
    s, keep = scaled(row, params), kept(row, params)
    scores = [s[t] + gumbel(_GUMBEL, params.seed, position, t) if keep[t] else -math.inf for t in range(len(s))]
    return int(np.argmax(scores))


def deterministic(step: SessionStep, rows: Float32Array) -> Outcome:
    """Return (path, tokens) of one session. rows: [1 + nodes, vocab]."""
    tree, node = step.tree, -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = own_token(rows[node + 1], step.params, step.base_len + len(path))
        tokens.append(token)
        following = [i for i in range(tree.num_nodes) if tree.parents[i] == node and tree.token_ids[i] == token]
        if not following:
            return tuple(path), tokens
        node = following[0]
        path.append(node)


def children_in_order(tree: Tree, node: int) -> list[int]:
    """Return the indices of a node's children in `probabilistic`'s order: sampled ones in draw order, then point
    masses.
    """
    children = [i for i in range(tree.num_nodes) if tree.parents[i] == node]
    return sorted(children, key=lambda i: (tree.distributions is None or tree.distributions.rows[i] < 0, i))


def draft_distribution(tree: Tree, node: int, earlier_siblings: list[int], vocab: int) -> Float64Array:
    """Return f64[vocab]: the distribution that the node's token was drawn from, given its earlier siblings."""
    probs: Float64Array = np.zeros(vocab)
    if tree.distributions is None or tree.distributions.rows[node] < 0:
        probs[tree.token_ids[node]] = 1
        return probs
    row = tree.distributions.rows[node]
    for token, weight in zip(
        tree.distributions.ids[row].tolist(), tree.distributions.weights[row].tolist(), strict=True
    ):
        if token >= 0 and token not in earlier_siblings:
            probs[token] = weight
    probs /= probs.sum()
    return probs


def probabilistic(step: SessionStep, rows: Float32Array) -> Outcome:
    """Return (path, tokens) of one session by the published rule.

    Sources: Leviathan et al. 2023, arXiv 2211.17192. For siblings: SpecInfer.
    """
    tree, params, node = step.tree, step.params, -1
    path: list[int] = []
    tokens: list[int] = []
    while True:
        position = step.base_len + len(path)
        target, following = distribution(rows[node + 1], params), None
        earlier_siblings: list[int] = []
        for child in children_in_order(tree, node):
            token = int(tree.token_ids[child])
            draft = draft_distribution(tree, child, earlier_siblings, len(target))
            if uniform(_ACCEPT, params.seed, position, token) < target[token] / draft[token]:
                following = child
                break
            target = np.maximum(target - draft, 0)
            target /= target.sum()
            earlier_siblings.append(token)
        if following is None:
            aim = uniform(_RESIDUAL, params.seed, position, 0)
            return tuple(path), [*tokens, int(np.flatnonzero(np.cumsum(target) > aim * target.sum())[0])]
        node = following
        path.append(node)
        tokens.append(int(tree.token_ids[node]))


def longest(step: SessionStep, rows: Float32Array, bar_of: Bars) -> Outcome:
    """Return (path, tokens) of a lossy strategy: the longest accepted path, then the likeliest, then the first."""
    tree = step.tree
    best: tuple[tuple[int, float], tuple[int, ...]] = ((0, 0.0), ())
    for leaf in range(tree.num_nodes):
        path = _path_to(tree, leaf)
        distributions = [bar_of(rows[tree.parents[i] + 1], step.params) for i in path]
        chances = [float(probs[tree.token_ids[i]]) for i, (probs, _) in zip(path, distributions, strict=True)]
        if all(chance > bar for chance, (_, bar) in zip(chances, distributions, strict=True)):
            merit = (len(path), sum(math.log(chance) for chance in chances))
            best = max(best, (merit, path), key=lambda found: found[0])
    path = best[1]
    last = path[-1] + 1 if path else 0
    own = own_token(rows[last], step.params, step.base_len + len(path))
    return path, [*tree.token_ids[list(path)].tolist(), own]


def _path_to(tree: Tree, node: int) -> tuple[int, ...]:
    return (*_path_to(tree, int(tree.parents[node])), node) if node >= 0 else ()


def threshold(step: SessionStep, rows: Float32Array) -> Outcome:
    """Accept a token if its probability exceeds a parameter."""

    def bar_of(row: Float32Array, params: SamplingParams) -> tuple[Float64Array, float]:
        at = params if params.temperature > 0 else dataclasses.replace(params, temperature=1.0)
        return distribution(row, at), params.threshold

    return longest(step, rows, bar_of)


def typical(step: SessionStep, rows: Float32Array) -> Outcome:
    """Accept a token if its probability exceeds a bar that falls with the row's entropy."""

    def bar_of(row: Float32Array, params: SamplingParams) -> tuple[Float64Array, float]:
        probs = distribution(row, params)
        entropy = -sum(x * math.log(x) for x in probs if x > 0)
        return probs, min(params.typical_eps, params.typical_delta * math.exp(-entropy))

    return longest(step, rows, bar_of)


def greedy(_step: SessionStep, rows: Float32Array) -> Outcome:
    """Return the likeliest token, without reading drafts."""
    return (), [int(np.argmax(rows[0]))]


# A naive judge for each strategy: (step, rows f32[1 + nodes, vocab]) -> (path, tokens).
RULES: dict[str, Callable[[SessionStep, Float32Array], Outcome]] = {
    "deterministic": deterministic,
    "probabilistic": probabilistic,
    "threshold": threshold,
    "typical": typical,
    "greedy": greedy,
}

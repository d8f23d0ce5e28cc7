"""The naive oracle: one session, one row, one token at a time, in plain Python; shares no code with what it checks."""

import dataclasses
import math

import numpy as np

_MASK = 2**32 - 1


def splitmix(x):
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def hash32(domain, seed, position, token):
    """The hash of `specq.verification.noise`, in Python integers."""
    mixed = splitmix((splitmix(seed ^ (domain * 0x9E3779B97F4A7C15 % 2**64)) + position) % 2**64)
    key0, key1 = mixed & _MASK, mixed >> 32
    x = (token * 0x9E3779B1 + key0) & _MASK
    x = ((x ^ (x >> 15)) * 0x7FEB352D) & _MASK
    x = (x + key1) & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    x ^= x >> 16
    return x ^ 2**31  # held in int32 as h - 2**31


def uniform(domain, seed, position, token):
    return (hash32(domain, seed, position, token) + 0.5) / 2**32


def gumbel(domain, seed, position, token):
    return np.float32(-math.log(-math.log1p(-uniform(domain, seed, position, token))))


def scaled(row, params):
    """f32[vocab]: (l - max l) / T."""
    row = np.asarray(row, np.float32)
    return (row - row.max()) / np.float32(params.temperature)


def kept(row, params):
    """bool[vocab]: what top-k, top-p and min-p keep, ties included."""
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


def distribution(row, params):
    """f64[vocab]: the distribution that the row's token is drawn from."""
    if params.temperature == 0:
        return np.eye(len(row))[int(np.argmax(row))]
    weights = np.where(kept(row, params), np.exp(scaled(row, params).astype(np.float64)), 0)
    return weights / weights.sum()


def own_token(row, params, position):
    """The target's own token under `deterministic`."""
    if params.temperature == 0:
        return int(np.argmax(row))
    s, keep = scaled(row, params), kept(row, params)
    scores = [s[t] + gumbel(1, params.seed, position, t) if keep[t] else -math.inf for t in range(len(s))]
    return int(np.argmax(scores))


def deterministic(step, rows):
    """(path, tokens) of one session; rows [1 + nodes, vocab]."""
    tree, path, tokens, node = step.tree, [], [], -1
    while True:
        token = own_token(rows[node + 1], step.params, step.base_len + len(path))
        tokens.append(token)
        following = [i for i in range(tree.num_nodes) if tree.parents[i] == node and tree.token_ids[i] == token]
        if not following:
            return tuple(path), tokens
        node = following[0]
        path.append(node)


def children_in_order(tree, node):
    """Indices of a node's children as `probabilistic` judges them: sampled ones in draw order, then point masses."""
    children = [i for i in range(tree.num_nodes) if tree.parents[i] == node]
    return sorted(children, key=lambda i: (tree.distributions is None or tree.distributions.rows[i] < 0, i))


def draft_distribution(tree, node, earlier_siblings, vocab):
    """f64[vocab]: what the node's token was drawn from, given its earlier siblings."""
    distribution = np.zeros(vocab)
    if tree.distributions is None or tree.distributions.rows[node] < 0:
        distribution[tree.token_ids[node]] = 1
        return distribution
    row = tree.distributions.rows[node]
    for token, weight in zip(
        tree.distributions.ids[row].tolist(), tree.distributions.weights[row].tolist(), strict=True
    ):
        if token >= 0 and token not in earlier_siblings:
            distribution[token] = weight
    return distribution / distribution.sum()


def probabilistic(step, rows, accept_uniform, residual_uniform):
    """(path, tokens) of one session by the published rule; the uniforms are functions of (position, token) and position."""
    tree, params, path, tokens, node = step.tree, step.params, [], [], -1
    while True:
        position = step.base_len + len(path)
        target, earlier_siblings, following = distribution(rows[node + 1], params), [], None
        for child in children_in_order(tree, node):
            token = int(tree.token_ids[child])
            draft = draft_distribution(tree, child, earlier_siblings, len(target))
            if accept_uniform(position, token) < target[token] / draft[token]:
                following = child
                break
            target = np.maximum(target - draft, 0)
            target /= target.sum()
            earlier_siblings.append(token)
        if following is None:
            aim = residual_uniform(position)
            return tuple(path), [*tokens, int(np.flatnonzero(np.cumsum(target) > aim * target.sum())[0])]
        node = following
        path.append(node)
        tokens.append(int(tree.token_ids[node]))


def longest(step, rows, bar_of):
    """(path, tokens) of a lossy strategy: of all accepted paths the longest, then the likeliest, then the first."""
    tree, best = step.tree, ((0, 0.0), ())
    for leaf in range(tree.num_nodes):
        path, node = [], leaf
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parents[node])
        distributions = [bar_of(rows[tree.parents[i] + 1], step.params) for i in path]
        chances = [float(probs[tree.token_ids[i]]) for i, (probs, _) in zip(path, distributions, strict=True)]
        if all(chance > bar for chance, (_, bar) in zip(chances, distributions, strict=True)):
            merit = (len(path), sum(math.log(chance) for chance in chances))
            best = max(best, (merit, tuple(path)), key=lambda found: found[0])
    path = best[1]
    last = path[-1] + 1 if path else 0
    own = own_token(rows[last], step.params, step.base_len + len(path))
    return path, [*tree.token_ids[list(path)].tolist(), own]


def threshold(step, rows):
    def bar_of(row, params):
        at = params if params.temperature > 0 else dataclasses.replace(params, temperature=1.0)
        return distribution(row, at), params.threshold

    return longest(step, rows, bar_of)


def typical(step, rows):
    def bar_of(row, params):
        probs = distribution(row, params)
        entropy = -sum(x * math.log(x) for x in probs if x > 0)
        return probs, min(params.typical_eps, params.typical_delta * math.exp(-entropy))

    return longest(step, rows, bar_of)


def greedy(step, rows):
    return (), [int(np.argmax(rows[0]))]

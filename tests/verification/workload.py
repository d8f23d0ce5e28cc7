"""Steps to judge: chains over made-up logits of any width, and chains drafted for `tiny` with its own logits."""

from dataclasses import replace

import numpy as np
import torch

from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol.params import SamplingParams
from specq.protocol.types import DraftDistributions, SessionStep, Tree
from specq.samples import load_prompts
from specq.text.codec import TextCodec, load_tokenizer_files
from specq.verification import StepBatch
from specq.verification.drafting import draw_children, truncated_distributions
from specq.verification.sampling import choose_tokens

RIGHT = 0.7  # the chance that a drafted point mass is the target's own token
CONTEXT = 128  # tokens of each session of `tiny`


def chain(tokens, distributions=None):
    """A tree that is a chain of nodes; distributions (ids i32[n, k], weights u16[n, k]) of sampled ones."""
    num = len(tokens)
    of_nodes = None if distributions is None else DraftDistributions(*distributions, np.arange(num, dtype=np.int32))
    return Tree(
        np.asarray(tokens, np.int32), np.arange(-1, num - 1, dtype=np.int32), np.zeros(num, np.float32), of_nodes
    )


def chains(num_sessions, num_nodes, logits, params, rng):
    """Steps over given logits [sessions * (nodes + 1), vocab] on any device; sampled nodes for `probabilistic`."""
    steps = []
    for s in range(num_sessions):
        rows, own = logits[s * (num_nodes + 1) :][: num_nodes + 1], replace(params, seed=s)
        if params.strategy == "probabilistic" and num_nodes:
            ids, weights = truncated_distributions(
                rows[:num_nodes] + torch.randn_like(rows[:num_nodes]), [own] * num_nodes
            )
            tree = chain(draw_children(ids, weights, 1, rng).token_ids[:, 0], (ids, weights))
        else:
            said = choose_tokens(rows, [own] * (num_nodes + 1), [100 + i for i in range(num_nodes + 1)])[:num_nodes]
            tree = chain(np.where(rng.random(num_nodes) < RIGHT, said, (said + 1) % logits.shape[1]))
        steps.append(SessionStep(s, 99, np.array([1], np.int32), own, tree))
    return steps


class Tiny:
    """`tiny`, with sessions that have KV of all but the last token of their contexts."""

    def __init__(self, num_sessions, threads=1):
        directory = resolve_model("tiny", "target")
        self.engine = TorchEngine(directory, device="cpu", threads=threads, kv_slots=1 << 14)
        codec = TextCodec(load_tokenizer_files(directory))
        text = [token for prompt in load_prompts(("gsm8k",), 64, codec) for token in prompt.token_ids]
        self.contexts = [np.array(text[s * 97 :][:CONTEXT], np.int32) for s in range(num_sessions)]
        for s, context in enumerate(self.contexts):
            start = self.engine.open(s, context)
            self.engine.step([SessionStep(s, start, context[start:-1], SamplingParams(), judged=False)])

    def forward(self, steps):
        """Return the logits of the steps' rows. No token is committed."""
        plan = self.engine._plan(StepBatch.of(steps))
        try:
            return self.engine._forward(plan.rows).logits
        finally:
            self.engine._pool.give(plan.slots)

    def steps(self, params, num_nodes, rng):
        """Chains drafted node by node: what the target says, mostly, or draws from a distribution near the target's."""
        trees = [chain([]) for _ in self.contexts]
        for depth in range(num_nodes):
            steps = self._steps(params, trees)
            last = self.forward(steps)[depth :: depth + 1]
            extend = _drawn if params.strategy == "probabilistic" else _said
            trees = extend(trees, last, [step.params for step in steps], CONTEXT + depth, rng)
        return self._steps(params, trees)

    def _steps(self, params, trees):
        return [
            SessionStep(s, CONTEXT - 1, context[-1:], replace(params, seed=s), tree)
            for s, (context, tree) in enumerate(zip(self.contexts, trees, strict=True))
        ]


def _said(trees, logits, params, position, rng):
    said = choose_tokens(logits, params, [position] * len(trees))
    other = logits.topk(2).indices[:, 1].numpy()
    tokens = np.where(rng.random(len(trees)) < RIGHT, said, np.where(other == said, said ^ 1, other))
    return [chain([*tree.token_ids, token]) for tree, token in zip(trees, tokens, strict=True)]


def _drawn(trees, logits, params, position, rng):
    near = logits + torch.from_numpy(rng.normal(0, 0.7, logits.shape).astype(np.float32))
    ids, weights = truncated_distributions(near, params)
    drawn = draw_children(ids, weights, 1, rng).token_ids[:, 0]
    grown = []
    for tree, *distribution, token in zip(trees, ids, weights, drawn, strict=True):
        before = (tree.distributions.ids, tree.distributions.weights) if tree.num_nodes else ([], [])
        distributions = [_stack([*old, new]) for old, new in zip(before, distribution, strict=True)]
        grown.append(chain([*tree.token_ids, token], distributions))
    return grown


def _stack(rows):
    """Distributions of unequal width as one array; unused places hold id -1, or weight 0."""
    width = max(map(len, rows))
    fill = -1 if rows[0].dtype == np.int32 else 0
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=fill) for row in rows])

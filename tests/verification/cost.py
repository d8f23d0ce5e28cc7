"""What judging costs: `python -m tests.verification.cost [--device cuda] [--vocab 4096] [--sessions 32] [--nodes 8]`.

Chains whose nodes agree with the target with probability 0.7; random logits, broader than a real model's. Prints the best
of many runs, in milliseconds, of `judge` and of its share in a forward pass of so many rows, where --forward-ms is given.
"""

import argparse
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from specq.params import SamplingParams
from specq.types import DraftLaws, SessionStep, Tree
from specq.verification.drafting import draw_children, truncated_laws
from specq.verification.judge import judge
from specq.verification.sampling import choose_tokens

SAMPLERS = {
    "T=0": {},
    "T=0.8": {"temperature": 0.8},
    "T=0.8 top_p=0.9": {"temperature": 0.8, "top_p": 0.9},
    "T=0.8 top_k=50 top_p=0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def chains(num_sessions, num_nodes, logits, params, rng):
    """Steps whose chains follow what the target says, mostly; sampled nodes for `probabilistic`."""
    steps = []
    for s in range(num_sessions):
        rows, own = logits[s * (num_nodes + 1) :][: num_nodes + 1], replace(params, seed=s)
        said = choose_tokens(rows, [own] * (num_nodes + 1), [100 + i for i in range(num_nodes + 1)])[:num_nodes]
        tokens = np.where(rng.random(num_nodes) < 0.7, said, (said + 1) % logits.shape[1]).astype(np.int32)
        tree = Tree(tokens, np.arange(-1, num_nodes - 1, dtype=np.int32), np.zeros(num_nodes, np.float32))
        if params.strategy == "probabilistic" and num_nodes:
            ids, weights = truncated_laws(rows[:num_nodes] + torch.randn_like(rows[:num_nodes]), [own] * num_nodes)
            drawn = draw_children(ids, weights, 1, rng).token_ids[:, 0]
            tree = replace(tree, token_ids=drawn, laws=DraftLaws(ids, weights, np.arange(num_nodes, dtype=np.int32)))
        steps.append(SessionStep(s, 99, np.array([1], np.int32), own, tree))
    return steps


def tell(line):
    sys.stdout.write(line + "\n")


def best_ms(function, device, repeats=30):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--forward-ms", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = options.sessions * (options.nodes + 1)
    logits = torch.randn(rows, options.vocab, device=options.device) * options.spread
    tell(f"{options.sessions} sessions x {options.nodes + 1} rows x {options.vocab}, {options.device}")
    for strategy in ("deterministic", "probabilistic", "threshold", "typical", "greedy"):
        for name, sampler in SAMPLERS.items():
            rng = np.random.default_rng(0)
            params = SamplingParams(strategy=strategy, **sampler)
            steps = chains(options.sessions, options.nodes, logits, params, rng)
            accepted = np.mean([len(judgement.path) for judgement in judge(steps, logits)])
            cost = best_ms(lambda steps=steps: judge(steps, logits), options.device)
            share = f", {cost / options.forward_ms:6.1%} of a forward" if options.forward_ms else ""
            tell(f"{strategy:14} {name:26} {cost:8.3f} ms, {accepted:.1f} accepted{share}")


if __name__ == "__main__":
    main()

"""Compare shapes of drafts on one prompt: a tree grown best first, candidates, and a fixed tree.

python examples/draft_shapes.py
"""

import os
from typing import Any

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")
SHAPES: dict[str, dict[str, Any]] = {
    "best first": {},
    "3 candidates": {"num_candidates": 3, "max_depth": 4},
    "a fixed tree": {"tree": [[0], [0, 0], [0, 0, 0], [1]]},
}


def main() -> None:
    with specq.Client(BROKER) as client:
        for name, shape in SHAPES.items():
            stats = client.generate("def add(a, b):", max_tokens=48, mode="sync", **shape).stats
            print(f"{name:>12}: {stats['mean_accepted_length']:.2f} tokens a round, {stats['draft_tokens']} verified")


if __name__ == "__main__":
    main()

"""The scheduler's rule against fixed draft lengths, simulated: `python -m tests.simulate.fixed_lengths [--json FILE]`.

The same scenario with the rule, without drafts, and with a scheduler that verifies the K likeliest nodes of each
session at any cost, for a number of sessions and drafters each.
"""

import argparse
import itertools
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from specq.runtime import log
from specq.runtime.machine import describe
from specq.simulate import Scenario, simulate
from specq.simulate.scenarios import read_measured
from specq.verifier.step import node_choice, plan

LENGTHS = (1, 2, 3, 4, 6, 8)
SCENARIO = {
    "engine": {"step_ms": [[1, 25.0], [154, 25.0], [308, 50.0]], "max_sessions": 256},
    "draft": {"pass_ms": [[1, 2.4], [8, 2.75], [64, 5.5]], "acceptance": 0.8, "width": 32},
    "network": {"rtt_ms": 1},
    "traffic": {"output_tokens": 128, "warm_s": 4, "seconds": 8},
}


@contextmanager
def fixed_length(count):
    """Let the scheduler take `count` nodes of each session, the likeliest, as far as there are any."""

    def choose_nodes(sessions, num_rows, room, curve, max_chain, *_):
        chosen, tokens = [np.zeros(0, np.int32)], 0.0
        firsts, nodes = node_choice.offered(sessions, max_chain) if sessions else ([], chosen[0])
        for first, end in itertools.pairwise(firsts):
            reach_prob = sessions[0].trees.reach_prob[nodes[first:end]]
            best = np.argsort(-reach_prob, kind="stable")[: min(count, room)]
            chosen.append(nodes[first + np.sort(best)])
            room -= len(best)
            tokens += float(reach_prob[best].sum())
        return node_choice.Chosen(np.cumsum([0, *map(len, chosen[1:])]), np.concatenate(chosen), tokens)

    with mock.patch.object(plan, "choose_nodes", choose_nodes):
        yield


def goodput(tables, sessions, drafters, mode="async"):
    """Tokens per second for these numbers of sessions and drafters."""
    own = {name: dict(table) for name, table in tables.items()}
    own["traffic"]["sessions"] = sessions
    own["draft"]["drafters"] = drafters
    own["speculation"] = {"mode": mode}
    return simulate(Scenario.from_tables(own)).goodput


def compare(tables, sessions, drafters, lengths=LENGTHS):
    """The rule, plain decoding, and each fixed length; ratios of the rule to the best length and to plain."""
    rule, plain = goodput(tables, sessions, drafters), goodput(tables, sessions, drafters, "plain")
    fixed = {}
    for length in lengths:
        with fixed_length(length):
            fixed[length] = goodput(tables, sessions, drafters)
    best = max([plain, *fixed.values()])
    return {
        "sessions": sessions, "drafters": drafters, "rule": round(rule, 1), "plain": round(plain, 1),
        "fixed": {length: round(rate, 1) for length, rate in fixed.items()},
        "to_best": round(rule / best, 3), "to_plain": round(rule / plain, 3),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--drafters", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--calibrate", type=Path, help="figures of `specq bench calibrate`, in place of made-up hardware"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    log.configure("error")
    tables = read_measured(options.calibrate).applied_to(SCENARIO) if options.calibrate else SCENARIO
    found = []
    for sessions, drafters in itertools.product(options.sessions, options.drafters):
        found.append(compare(tables, sessions, drafters))
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()
    if options.json is not None:
        report = describe(" ".join(("python -m tests.simulate.fixed_lengths", *sys.argv[1:])))
        options.json.write_text(json.dumps(report | {"compared": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

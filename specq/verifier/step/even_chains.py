"""How long the chains of a step are where all sessions have equally many rows: for an engine that computes such steps at once and others in pieces
(`specq.engines.even_chains`). Pure.

One length for all: a session with fewer nodes has rows that bring nothing, and of one with more the likeliest are verified. Each length is held
against the others, and against none, by its goodput, the rows that bring nothing counted in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specq.protocol import BoolArray, Float64Array, Int64Array
from specq.verification import places_in_runs
from specq.verifier.control.step_curve import StepCurve


def in_even_chains(
    firsts: Int64Array,
    reach_prob: Float64Array,
    room: int,
    curve: StepCurve,
    even_chains: Mapping[int, int],
    saved_s: float = 0.0,
) -> BoolArray:
    """Return bool[num_offered]: which nodes of sessions that have one row each are verified.

    firsts, reach_prob   as in `choose_nodes`, each session's nodes being one chain; room: rows that may be added
    even_chains          as of `specq.engines.even_chains`; saved_s as of `plan`
    """
    num_sessions = len(firsts) - 1
    depths = places_in_runs(np.diff(firsts))
    most, best = 0, num_sessions / (curve(num_sessions) - saved_s)
    for length, most_sessions in even_chains.items():
        if num_sessions > most_sessions or num_sessions * length > room:
            continue
        is_in = depths < length
        tokens = num_sessions + float(reach_prob[is_in].sum())
        goodput = tokens / curve(num_sessions * (1 + length), int(np.count_nonzero(is_in)))
        if goodput > best:
            most, best = length, goodput
    found: BoolArray = depths < most
    return found

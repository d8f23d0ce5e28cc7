"""What is computed from measurements: by hand, and against rounds that are played."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from specq.doctor.advice import Situation, advise
from specq.doctor.prediction import (
    NAMES,
    PLAIN,
    WORKER,
    Costs,
    PredictedMethod,
    PredictedRound,
    PredictedRounds,
    Prediction,
    most_rows_per_s,
    predict,
    significant,
    worker,
)
from specq.drafting import SOURCES
from specq.protocol import COLOCATED, EAGLE, LOOKAHEAD, SUFFIX
from specq.protocol import MEDUSA as HEADS
from tests.each import each


def test_every_source_has_a_name_in_the_report():
    """The report names what drafted; a source of the table without one would end it with a traceback."""
    assert set(SOURCES) <= set(NAMES)


def flat(seconds: float):
    return lambda _: seconds


def by_rows(first_s: float, more_s: float):
    return lambda rows: first_s + more_s * (rows - 1)


def costs(step=None, *, host_s: float = 0.0, host_more_s: float = 0.0, level=None, pass_s: float = 0.0) -> Costs:
    curve = step or flat(0.010)
    return Costs(curve, curve, host_s, host_more_s, level, pass_s)


def rates(found: list[Prediction]) -> dict[tuple[str, int], float]:
    return {(one.method, one.num_sessions): one.tokens_per_second for one in found}


def rounds_of(*rounds: tuple[int, tuple[int, ...]]) -> PredictedRounds:
    """Return rounds, each given by its accepted tokens and its nodes by depth."""
    return PredictedRounds(tuple(PredictedRound(*one) for one in rounds))


def test_rounds_are_cut_at_a_depth():
    rounds = rounds_of((2, (3, 3, 1)), (0, (3, 1)), (1, (2,)), (0, ()))
    assert [rounds.tokens(depth) for depth in range(4)] == [1.0, 1.5, 1.75, 1.75]
    assert [rounds.nodes(depth) for depth in range(4)] == [0.0, 2.0, 3.0, 3.25]
    assert rounds.deepest == 3
    assert rounds.accept_probs() == [pytest.approx(2 / 3), 1.0, 0.0], "where a level was reached and nodes stood there"


def test_plain_decoding_is_a_step_and_the_host():
    found = rates(predict([], costs(by_rows(0.008, 0.001), host_s=0.001, host_more_s=0.0005), [1, 4]))
    assert found == {(PLAIN, 1): pytest.approx(1 / 0.009), (PLAIN, 4): pytest.approx(4 / (0.011 + 0.0025))}


def test_a_method_pays_its_rows_and_its_own_time():
    rounds = rounds_of((1, (1,)), (0, (1,)))
    found = predict([PredictedMethod(SUFFIX, rounds, own_s=0.001)], costs(by_rows(0.010, 0.002)), [1, 2])
    assert rates(found)[SUFFIX, 1] == pytest.approx(1.5 / (0.012 + 0.001))
    assert rates(found)[SUFFIX, 2] == pytest.approx(3.0 / (0.016 + 0.002))
    assert found[1].ratio == pytest.approx(1.5 * 0.010 / 0.013)


def test_steps_of_few_and_of_many_rows_are_not_steps_of_some():
    """With one session rounds of 0 and of 8 nodes alternate; with two each step has both."""
    few = rounds_of((0, ()), (1, (8,)))
    rounds = PredictedRounds(few.rounds * 4)
    times = {1: 0.004, 9: 0.012, 10: 0.013, 11: 0.02}

    def curve(rows: int) -> float:
        return times.get(rows, 1.0)

    found = rates(predict([PredictedMethod(SUFFIX, rounds)], costs(curve), [1]))
    assert found[SUFFIX, 1] == pytest.approx(1.5 / 0.008)
    assert [few.step_s(curve, 2, rows, 1) for rows in (2, 3)] == pytest.approx([0.013, 0.02])


def test_the_depth_with_the_most_tokens_a_second_is_taken():
    """Of chains whose second token is never right, the second level is left out."""
    rounds = rounds_of(*[(1, (1, 1))] * 3)
    (_, found) = predict([PredictedMethod(SUFFIX, rounds)], costs(by_rows(0.010, 0.002)), [1])
    assert found.depth == 1
    assert found.tokens_per_second == pytest.approx(2 / 0.012)


@each(("num_places", "level"), [(1, by_rows(0.001, 0.0005)), (4, flat(0.001))])
def test_a_draft_model_drafts_as_deep_as_its_own_rule_says(num_places, level):
    """Its own time is that of its levels, which take longer for more sessions: for 3, half as many of twice the time. A
    parallel one needs one pass for all of its levels."""
    depths = {1: 2, 3: 1, 9: 0}
    method = PredictedMethod(COLOCATED, rounds_of((2, (1, 1))), own_s=0.002, levels=depths.__getitem__)
    found = rates(predict([method], replace(costs(level=level), num_places=num_places), [1, 3, 9]))
    assert found[COLOCATED, 1] == pytest.approx(3 / 0.012)
    assert found[COLOCATED, 3] == pytest.approx(6 / 0.012)
    assert found[COLOCATED, 9] == found[PLAIN, 9]


def test_a_window_of_fewer_columns_brings_as_much_less():
    rows = {1: 60, 2: 30, 4: 0}
    method = PredictedMethod(LOOKAHEAD, rounds_of((1, (1,))), scratch=rows.__getitem__)
    found = rates(predict([method], costs(by_rows(0.010, 0.0001)), [1, 2, 4]))
    assert found[LOOKAHEAD, 1] == pytest.approx(2 / (0.010 + 0.0001 * 61))
    assert found[LOOKAHEAD, 2] == pytest.approx(3 / (0.010 + 0.0001 * 62))  # 2 * (1 + 0.5 + 30) rows
    assert found[LOOKAHEAD, 4] == found[PLAIN, 4]


def test_a_method_without_drafts_is_plain_decoding():
    found = rates(predict([PredictedMethod(COLOCATED, rounds_of(*[(0, ())] * 5))], costs(level=flat(0.001)), [1]))
    assert found[COLOCATED, 1] == found[PLAIN, 1]


# --- a draft worker ---------------------------------------------------------------------------------------------------


def chain(probs: list[float], count: int = 4000) -> PredictedRounds:
    """Return rounds of chains whose levels are accepted as likely as that."""
    rng = random.Random(1)
    found = []
    for _ in range(count):
        accepted = next((i for i, prob in enumerate(probs) if rng.random() >= prob), len(probs))
        found.append(PredictedRound(accepted, (1,) * len(probs)))
    return PredictedRounds(tuple(found))


@each(("prob", "ahead"), product([0.3, 0.6, 0.9], [2, 4]))
def test_a_draft_worker_alternates_between_a_chain_and_no_draft(prob, ahead):
    """As rounds that are played one after the other say: a chain is there if the one before it was accepted as a whole
    and foresaw the target's token, or, where there was none, if it foresaw that."""
    rounds = chain([prob] * 8)
    rate, depth = worker(rounds, costs(flat(0.010), pass_s=0.010 / (ahead + 1)), 1)
    assert depth == ahead

    rng, tokens, is_there, turns = random.Random(2), 0, False, 40_000
    for _ in range(turns):
        run = next((i for i in range(depth + 1) if rng.random() >= prob), depth + 1)
        tokens += 1 + (min(run, depth) if is_there else 0)
        is_there = run > depth if is_there else run > 0
    assert rate == pytest.approx(tokens / turns / 0.010, rel=0.03)


def test_a_draft_workers_rows_cost_only_where_there_is_a_chain():
    """Half of its chains are right, so half of all rounds find one, of two levels."""
    rounds = rounds_of((0, (1, 1)), (2, (1, 1)))
    rate, depth = worker(rounds, costs(by_rows(0.010, 0.001), pass_s=0.0025), 1)
    assert depth == 2
    assert rate == pytest.approx(1.5 / (0.5 * 0.012 + 0.5 * 0.010))


def test_a_slow_draft_worker_brings_no_gain():
    """It costs the help of its core all the same."""
    slow = Costs(flat(0.008), flat(0.010), 0.0, 0.0, pass_s=0.006)
    assert worker(chain([0.9] * 4), slow, 1) == (pytest.approx(1 / 0.010), 0)


def test_a_draft_workers_passes_serve_all_sessions():
    drafted = PredictedMethod(COLOCATED, chain([0.8] * 8))
    found = predict([drafted], costs(flat(0.010), level=flat(0.001), pass_s=0.001), [1, 64])
    depths = {one.num_sessions: one.depth for one in found if one.method == WORKER}
    assert depths == {1: 8, 64: 0}


def test_a_draft_workers_tokens_and_rows_come_from_the_same_rounds():
    """Where the draft model went four levels deep it was always right, and where it went one level deep never: half of
    the chains, not all."""
    rounds = rounds_of(*[(4, (1,) * 4), (0, (1,))] * 8)
    assert rounds.accept_probs() == [0.5, 1.0, 1.0, 1.0]
    assert rounds.reach_probs() == [0.5] * 4
    rows_per_s = 100.0
    rate, depth = worker(rounds, costs(lambda rows: rows / rows_per_s, pass_s=0.001), 1)
    assert depth == 4
    assert rate <= rows_per_s


def test_rounds_without_drafts_do_not_rate_a_draft_worker():
    drafted = chain([0.8] * 4, 50)
    mixed = PredictedRounds((*drafted.rounds, *[PredictedRound(0)] * 200))
    assert worker(mixed, costs(pass_s=0.002), 1) == worker(drafted, costs(pass_s=0.002), 1)
    assert worker(rounds_of((0, ())), costs(pass_s=0.001), 1) == (pytest.approx(100.0), 0)


@each("seed", range(20))
def test_no_prediction_needs_more_rows_a_second_than_steps_compute(seed):
    """Of any rounds, on any curve: `predict` asserts it, and here it is looked at from outside."""
    rng = random.Random(seed)
    rounds = [tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 8))) for _ in range(60)]
    found = rounds_of(*((rng.randint(0, len(nodes)), nodes) for nodes in rounds))
    step = by_rows(rng.uniform(0.001, 0.02), rng.uniform(0.0, 0.01))
    methods = [
        PredictedMethod(COLOCATED, found),
        PredictedMethod(SUFFIX, found),
        PredictedMethod(LOOKAHEAD, found, scratch=lambda n: 7 // n),
    ]
    for one in predict(methods, costs(step, level=flat(0.001), pass_s=0.0005), [1, 2, 8]):
        most = one.num_sessions * 25
        assert one.tokens_per_second <= 1.000001 * most_rows_per_s(step, one.num_sessions * 8 + most)


def test_curves_that_cannot_be_compared_are_a_mistake_of_ours():
    """As where steps seem to be quicker while others have the cores: curves that were not measured together."""
    quick = Costs(by_rows(0.02, 0.01), by_rows(0.005, 0.0005), 0.0, 0.0, flat(0.001), 0.0005)
    with pytest.raises(AssertionError, match="a token needs a row"):
        predict([PredictedMethod(COLOCATED, chain([0.9] * 8))], quick, [1, 8])


def test_figures_have_the_digits_that_mean_something():
    assert [significant(value) for value in (26.616, 0.0123456, 1234.5, 0.0)] == [26.6, 0.0123, 1230.0, 0.0]
    assert significant(166.45, 2) == 170.0


def test_without_a_free_core_no_draft_worker_is_predicted():
    found = predict([PredictedMethod(COLOCATED, chain([0.8]))], costs(level=flat(0.001)), [1])
    assert WORKER not in {one.method for one in found}


# --- advice -----------------------------------------------------------------------------------------------------------


def test_a_pass_of_a_parallel_draft_model_gives_a_worker_several_levels():
    steps = costs(flat(0.010), pass_s=0.004)
    assert worker(chain([0.8] * 8), steps, 1)[1] == 1
    assert worker(chain([0.8] * 8), replace(steps, num_places=4), 1)[1] == 7


HERE = Situation(models="", has_draft=True, num_bytes=10**8, num_cores=2, has_gpu=False, has_vllm=False)


def predicted(method: str, num_sessions: int, ratio: float) -> list[Prediction]:
    return [Prediction(PLAIN, num_sessions, 100.0, 1.0), Prediction(method, num_sessions, 100 * ratio, ratio)]


def test_the_best_method_is_named_with_its_command_and_only_where_it_changes():
    said = advise(HERE, [*predicted(COLOCATED, 1, 2.0), *predicted(COLOCATED, 4, 1.5), *predicted(WORKER, 8, 1.3)])
    assert len(said) == 2
    assert "1 session at a time draft model in the verifier" in said[0]
    assert said[0].endswith("2.0 times plain decoding: specq up --serve")
    assert said[1].endswith("specq up --serve --drafters 1")


def test_a_gain_within_the_error_of_a_prediction_is_none():
    (said,) = advise(HERE, predicted(COLOCATED, 8, 1.2))
    assert "no method is predicted to gain more than 25%" in said
    assert said.endswith("specq up --serve --drafters 0")


def test_on_a_busy_machine_no_way_of_drafting_is_advised():
    (said,) = advise(HERE, predicted(WORKER, 1, 3.1), "other processes used 1.6 of 2 processors")
    assert "The best drafting method is unknown" in said
    assert "1.6 of 2 processors" in said
    assert "--drafters" not in said
    assert "specq up --serve" in said


def test_a_specq_that_runs_here_already_is_spoken_of():
    *_, said = advise(replace(HERE, runs_here="1 broker, 2 workers"), predicted(COLOCATED, 1, 2.0))
    assert said.startswith("specq is already running here (1 broker, 2 workers")


@each(
    ("changes", "said"),
    [
        ({"has_draft": False}, "There is no draft model"),
        ({"num_bytes": 2 * 10**10}, "large for a CPU"),
        ({"has_gpu": True}, "install vllm"),
        ({"num_cores": 1}, "one core"),
    ],
)
def test_the_machine_and_the_models_are_spoken_of(changes, said):
    assert any(said in sentence for sentence in advise(replace(HERE, **changes), []))
    assert not any(said in sentence for sentence in advise(HERE, []))


@each("method", [HEADS, EAGLE])
def test_heads_are_advised_with_their_option_and_alone(method):
    """And what is not theirs is advised without them."""
    assert advise(replace(HERE, models=" --model m"), [])[0] == "Start it: specq up --serve --model m"
    here = replace(HERE, models=" --model m", heads=" --heads h")
    assert advise(here, predicted(method, 1, 1.5))[0].endswith("specq up --serve --model m --heads h --drafters 0")
    assert advise(here, predicted(COLOCATED, 1, 1.5))[0].endswith("specq up --serve --model m")
    assert advise(here, predicted(COLOCATED, 1, 1.0))[0].endswith("specq up --serve --model m --drafters 0")
    assert advise(here, [])[0] == "Start it: specq up --serve --model m --heads h"

"""Texts that a real target said, in a simulation: they come back, and what repeats itself in them is looked up."""

import math
import random

import pytest

from bench.calibrate.compare import predict
from specq.simulate import Scenario
from specq.simulate.run import Simulation
from specq.simulate.settings import DrafterSettings, EngineSettings, TrafficSettings
from specq.simulate.stubs import RecordedGuesses, RecordedText, StubGuesses

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18]
REPEATING = [([3, 4], PERIOD * 8), ([5], PERIOD * 8)]
DRAW = random.Random(1)
PLAIN = [([3, 4], DRAW.sample(range(1, 30_000), 64)), ([5], DRAW.sample(range(1, 30_000), 64))]


def served(texts, output_tokens: int = 64) -> tuple[Simulation, float]:
    """Serve each text's job, one at a time; return the simulation, and how long it took."""
    scenario = Scenario(
        engine=EngineSettings(step_ms=((1, 10.0), (64, 10.0)), session_us=0),
        draft=DrafterSettings(drafters=0),
        traffic=TrafficSettings(output_tokens=output_tokens, num_jobs=len(texts)),
    )
    simulation = Simulation(scenario, texts)
    return simulation, simulation.run_jobs(scenario.traffic, scenario.speculation)


def test_jobs_say_what_was_recorded():
    """The users compare each text with the recorded one, so that a job that ends has it; all of them ended."""
    simulation, seconds = served(PLAIN)
    assert [job.num_tokens for job in simulation.users.finished] == [64, 64]
    assert seconds == pytest.approx(128 * 0.010, rel=0.05)
    simulation, _ = served([([49_151, 4], [151_000, 7, 9])], 3)  # more tokens than made-up texts have
    assert [job.num_tokens for job in simulation.users.finished] == [3]


def test_what_repeats_itself_is_looked_up_and_prompts_have_been_computed_before():
    """A prompt of 1,000 tokens takes no longer than one of two: a step of 64 rows and more would be seen."""
    _, seconds = served(PLAIN)
    assert served(REPEATING)[1] < 0.5 * seconds
    long = [(DRAW.sample(range(1, 30_000), 1000), tokens) for _, tokens in PLAIN]
    assert served(long)[1] == pytest.approx(seconds, rel=0.01)


def test_chances_lie_along_the_texts():
    """The drafter errs where it was measured to err: at the position of the text, whichever job has it."""
    text = RecordedText(PLAIN)
    chances = [1.0] * 128
    chances[64 + 5] = 0.0  # the sixth token of the second text
    guesses = StubGuesses(text, chances, (0.0,))
    for job_id in (1, 3):  # of the second text
        prompt, tokens = PLAIN[1]
        assert text.prompt(job_id, 1).tolist() == prompt
        places = range(len(prompt), len(prompt) + 64)
        wrong = [at for at in places if guesses.children(job_id, at, -1, 1)[0] != [text.token(job_id, at, -1)]]
        assert wrong == [len(prompt) + 5]
        assert text.token(job_id, len(prompt) + 5, -1) == tokens[5]


def test_a_drafter_is_right_where_it_was():
    """At each position the target's token is the choice that it was, and the first is claimed to be as likely as it
    was."""
    text = RecordedText(PLAIN)
    choices = [[0.25 + at / 256, at % 4] for at in range(128)]  # of three choices; 3: none of them
    guesses = RecordedGuesses(text, choices, (0.5, 0.5))
    prompt, tokens = PLAIN[1]
    for at, token in enumerate(tokens):
        found, scores = guesses.children(1, len(prompt) + at, -1, 3)
        claim, rank = choices[64 + at]
        assert (found.index(token) if token in found else 3) == rank
        assert math.exp(scores[0]) == pytest.approx(claim, rel=1e-3)


def test_what_was_learned_stays_for_the_next_jobs():
    """Jobs are served in the order of the real runs, by the same processes: the next ones find a verifier that has
    learned."""
    scenario = Scenario(
        engine=EngineSettings(step_ms=((1, 10.0), (64, 30.0)), session_us=0),
        traffic=TrafficSettings(output_tokens=64, num_jobs=len(PLAIN)),
    )
    simulation = Simulation(scenario, PLAIN, [[0.9, 0]] * 128)
    states = []
    for _ in range(2):
        simulation.run_jobs(scenario.traffic, scenario.speculation)
        states.append(simulation.metrics())
    assert len(simulation.users.finished) == 2 * len(PLAIN)
    assert states[1]["steps"] > states[0]["steps"]
    assert states[1]["sent"]["remote"] > states[0]["sent"]["remote"] > 0


def test_predictions_are_of_the_same_jobs():
    """Plain decoding of two jobs of 64 tokens in steps of 10 ms; where texts repeat, asynchronous drafting gains by
    lookups."""
    tables = {
        "engine": {"step_ms": [[1, 10.0], [64, 10.0]], "session_us": 0.0},
        "draft": {"drafters": 0},
        "network": {"rtt_ms": 0.1},
        "traffic": {"output_tokens": 64},
    }
    plain, ahead = predict(tables, REPEATING, (), 0.0, ("plain", "async")).values()
    assert plain["tokens_per_second"] == pytest.approx(100, rel=0.05)
    assert plain["mean_accepted_length"] == 1.0
    assert plain["steps"]["num_steps"] == 128
    assert plain["steps"]["step_ms"] == pytest.approx(10, rel=0.01)
    assert ahead["tokens_per_second"] > 2 * plain["tokens_per_second"]

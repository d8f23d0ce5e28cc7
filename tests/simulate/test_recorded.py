"""Texts that a real target said, in a simulation: they come back, and what repeats itself in them is looked up."""

import random

import pytest

from specq.bench.calibrate.compare import predict
from specq.simulate import Scenario
from specq.simulate.run import Simulation
from specq.simulate.settings import DraftSettings, EngineSettings, TrafficSettings
from specq.simulate.stub_text import RecordedText, StubGuesses

PERIOD = [11, 12, 13, 14, 15, 16, 17, 18]
REPEATING = [([3, 4], PERIOD * 8), ([5], PERIOD * 8)]
DRAW = random.Random(1)
PLAIN = [([3, 4], DRAW.sample(range(1, 30_000), 64)), ([5], DRAW.sample(range(1, 30_000), 64))]


def served(texts, drafters: int = 0) -> tuple[Simulation, float]:
    """Serve each text's job, one at a time; return the simulation, and how long it took."""
    scenario = Scenario(
        engine=EngineSettings(step_ms=((1, 10.0), (64, 10.0)), session_us=0),
        draft=DraftSettings(drafters=drafters),
        traffic=TrafficSettings(output_tokens=64, num_jobs=len(texts)),
    )
    simulation = Simulation(scenario, texts)
    return simulation, simulation.run_jobs()


def test_jobs_say_what_was_recorded():
    """The users compare each text with the recorded one, so that a job that ends has it; all of them ended."""
    simulation, seconds = served(PLAIN)
    assert [job.num_tokens for job in simulation.users.finished] == [64, 64]
    assert seconds == pytest.approx(128 * 0.010, rel=0.05)


def test_a_large_vocabulary_is_no_hindrance():
    """Texts of a model with more tokens than made-up texts have."""
    texts = [([49_151, 4], [151_000, 7, 9])]
    scenario = Scenario(traffic=TrafficSettings(output_tokens=3, num_jobs=1))
    simulation = Simulation(scenario, texts)
    simulation.run_jobs()
    assert [job.num_tokens for job in simulation.users.finished] == [3]


def test_what_repeats_itself_is_looked_up():
    assert served(REPEATING)[1] < 0.5 * served(PLAIN)[1]


def test_prompts_have_been_computed_before():
    """A prompt of 1,000 tokens takes no longer than one of two: a step of 64 rows and more would be seen."""
    long = [(DRAW.sample(range(1, 30_000), 1000), tokens) for _, tokens in PLAIN]
    assert served(long)[1] == pytest.approx(served(PLAIN)[1], rel=0.01)


def test_chances_lie_along_the_texts():
    """The drafter errs where it was measured to err: at the position of the text, whichever job has it."""
    text = RecordedText(PLAIN)
    chances = [1.0] * 128
    chances[64 + 5] = 0.0  # the sixth token of the second text
    guesses = StubGuesses(text, chances, (0.0,))
    for job_id in (1, 3):  # of the second text
        prompt, tokens = PLAIN[1]
        assert text.prompt(job_id, 1).tolist() == prompt
        wrong = [
            at
            for at in range(64)
            if guesses.children(job_id, len(prompt) + at, -1, 1)[0] != [text.token(job_id, len(prompt) + at, -1)]
        ]
        assert wrong == [5]
        assert text.token(job_id, len(prompt) + 5, -1) == tokens[5]


def test_predictions_are_of_the_same_jobs():
    """Plain decoding of two jobs of 64 tokens in steps of 10 ms; where texts repeat, asynchronous drafting gains by lookups."""
    tables = {
        "engine": {"step_ms": [[1, 10.0], [64, 10.0]], "session_us": 0.0},
        "draft": {"drafters": 0},
        "network": {"rtt_ms": 0.1},
        "traffic": {"output_tokens": 64},
    }
    plain, ahead = (predict(tables, REPEATING, 0.0, mode) for mode in ("plain", "async"))
    assert plain["tokens_per_second"] == pytest.approx(100, rel=0.05)
    assert plain["mean_accepted_length"] == 1.0
    assert ahead["tokens_per_second"] > 2 * plain["tokens_per_second"]

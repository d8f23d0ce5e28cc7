"""The stub models: texts, guesses and times are what they are said to be."""

import math
from collections import Counter

import numpy as np
import pytest

from specq.drafting import Expansion
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep, Tree
from specq.simulate.scenarios import HardwareCurve
from specq.simulate.settings import DrafterSettings, EngineSettings
from specq.simulate.stub_drafter import TimedProposer
from specq.simulate.stubs import StubGuesses, StubText, TimedEngine
from specq.testing.toy import toy_info

TEXT = StubText(seed=5)
PARAMS = SamplingParams()


def say(session_id: int, start: int, previous: int, count: int) -> list[int]:
    tokens = []
    for position in range(start, start + count):
        previous = TEXT.token(session_id, position, previous)
        tokens.append(previous)
    return tokens


# --- the curve ----------------------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_points_and_goes_on():
    curve = HardwareCurve([[1, 10], [5, 10], [10, 20]])
    assert [curve(load) * 1e3 for load in (0, 1, 3, 5, 7.5, 10, 20)] == pytest.approx([10, 10, 10, 10, 15, 20, 40])
    assert HardwareCurve([[4, 2]])(100) == 0.002


# --- the text -----------------------------------------------------------------------------------------------------


def test_the_text_depends_on_all_of_its_keys():
    tokens = {TEXT.token(1, 2, 3), TEXT.token(2, 2, 3), TEXT.token(1, 3, 3), TEXT.token(1, 2, 4)}
    assert len({*tokens, StubText(seed=6).token(1, 2, 3)}) == 5
    assert all(0 < TEXT.token(1, position, 0) < TEXT.vocab_size for position in range(1000))


def test_only_the_targets_own_text_follows():
    tokens = say(1, 3, 9, 20)
    assert TEXT.follows(1, [7, 8, 9], tokens)
    for i in range(20):
        wrong = [*tokens]
        wrong[i] += 1
        assert not TEXT.follows(1, [7, 8, 9], wrong)


def test_ranks_have_their_chances():
    """First, second, third choice right, or none; by session, position and token."""
    guesses = StubGuesses(TEXT, [0.6], [0.5, 0.25])
    counts = Counter(guesses.rank(i % 7, i, i % 11) for i in range(20_000))
    shares = [counts[rank] / 20_000 for rank in range(4)]
    assert shares == pytest.approx([0.6, 0.2, 0.05, 0.15], abs=0.01)


def test_children_are_distinct_and_have_the_right_token_where_the_rank_says():
    guesses = StubGuesses(TEXT, [0.6], [0.5, 0.25])
    for position in range(300):
        tokens, scores = guesses.children(1, position, 4, 3)
        rank, right = guesses.rank(1, position, 4), TEXT.token(1, position, 4)
        assert len(set(tokens)) == 3
        assert (tokens.index(right) if right in tokens else 3) == rank
        assert np.exp(scores).tolist() == pytest.approx([0.6, 0.2, 0.05])


def test_acceptance_may_vary_by_position():
    """The list repeats itself; each session begins somewhere of its own; scores say what holds at the position."""
    guesses = StubGuesses(TEXT, [1.0, 0.0, 0.5], [0.0])
    ranks = [guesses.rank(1, position, position) for position in range(30)]
    start = next(i for i in range(3) if math.exp(guesses.children(1, i, 0, 1)[1][0]) == pytest.approx(1.0))
    assert all(ranks[i] == 0 for i in range(start, 30, 3))
    assert all(ranks[i] > 0 for i in range(start + 1, 30, 3))
    starts = {guesses.children(s, 0, 0, 1)[1][0].item() for s in range(50)}
    assert len(starts) == 3


def test_a_liar_claims_what_it_likes():
    guesses = StubGuesses(TEXT, [0.0], [0.0], claims=[0.9])
    assert {guesses.rank(1, position, 0) for position in range(200)} == {2}
    assert math.exp(guesses.children(1, 0, 0, 2)[1][0]) == pytest.approx(0.9)


def test_no_choice_is_likelier_than_the_one_before():
    guesses = StubGuesses(TEXT, [0.2], [0.9, 0.9])
    assert np.exp(guesses.children(1, 0, 0, 3)[1]).tolist() == pytest.approx([0.2, 0.2, 0.2])
    counts = Counter(guesses.rank(1, i, 0) for i in range(10_000))
    assert [counts[i] / 10_000 for i in range(3)] == pytest.approx([0.2] * 3, abs=0.015)


# --- the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> TimedEngine:
    settings = EngineSettings(step_ms=((1, 10.0), (11, 20.0)), session_us=1000, context_us=500_000)
    return TimedEngine(settings, TEXT, toy_info())


def prompted(engine: TimedEngine, session_id: int, count: int = 4) -> int:
    """Open a session and compute all of its prompt but the last token, which is returned."""
    prompt = TEXT.prompt(session_id, count)
    engine.open(session_id, prompt)
    engine.step([SessionStep(session_id, 0, prompt[:-1], PARAMS, judged=False)])
    return int(prompt[-1])


def decoding(session_id: int, start: int, token: int, tree: Tree) -> SessionStep:
    return SessionStep(session_id, start, np.array([token], np.int32), PARAMS, tree)


def tree(tokens: list[int], parents: list[int]) -> Tree:
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(len(tokens), np.float32))


def test_the_engine_follows_its_text_down_the_tree(engine):
    """A right node below a wrong one is not accepted; the correction follows the last accepted."""
    last = prompted(engine, 1)
    first, second, third = say(1, 4, last, 3)
    drafted = tree([first + 1, first, second, second + 1, second], [-1, -1, 0, 1, 1])
    (judgement,) = engine.step([decoding(1, 3, last, drafted)]).judgements
    assert judgement.path == (1, 4)
    assert judgement.token_ids.tolist() == [first, second, third]
    assert (engine.num_rounds, engine.num_nodes, engine.num_accepted) == (1, 5, 2)
    assert engine.free_slots == engine.info.kv_slots - 4 - 2


def test_a_step_takes_the_curve_and_what_sessions_add(engine):
    """2 sessions, 4 rows: 13 ms, 1 ms a session, and 0.5 s for each 1,000 of the 4 + 4 tokens of KV."""
    lasts = [prompted(engine, session_id) for session_id in (1, 2)]
    before = engine.busy_s
    engine.step([decoding(i, 3, lasts[i - 1], tree([5], [-1])) for i in (1, 2)])
    assert engine.busy_s - before == pytest.approx(0.013 + 0.002 + 0.004)
    assert engine.step_times([1, 4, 11]) == pytest.approx([0.011, 0.017, 0.028])


def test_the_engine_notices_a_broken_contract(engine):
    last = prompted(engine, 1)
    with pytest.raises(EngineError, match="starts at 2; its KV holds 3"):
        engine.step([decoding(1, 2, last, tree([], []))])
    with pytest.raises(EngineError, match="already open"):
        engine.open(1, TEXT.prompt(1, 4))
    full = engine.info.kv_slots
    with pytest.raises(EngineError, match="are free"):
        engine.step([decoding(1, 3, last, tree([1] * full, [-1] * full))])
    engine.close(1)
    assert engine.free_slots == full


# --- the proposer -------------------------------------------------------------------------------------------------


@pytest.fixture
def proposer() -> TimedProposer:
    settings = DrafterSettings(pass_ms=((1, 1.0), (101, 101.0)), acceptance=(1.0,), ranks=(0.0,))
    return TimedProposer(settings, StubGuesses(TEXT, (1.0,), (0.0,)), toy_info())


def test_a_perfect_proposer_drafts_the_text(proposer):
    prompt = TEXT.prompt(1, 4)
    proposer.open(1, prompt, PARAMS)
    node, said = -1, []
    for i in range(6):
        (children,) = proposer.expand([Expansion(1, node, (10 + 2 * i, 11 + 2 * i))])
        said.append(int(children.token_ids[0]))
        node = 10 + 2 * i
    assert said == say(1, 4, int(prompt[-1]), 6)


def test_a_pass_takes_its_rows(proposer):
    """The prompt once, then one row a node; a correction that was not drafted is a row more."""
    prompt = TEXT.prompt(1, 4)
    proposer.open(1, prompt, PARAMS)
    times = [0.0]

    def expand(*nodes: int) -> None:
        before = proposer.busy_s
        proposer.expand([Expansion(1, node, (node * 10 + 11, node * 10 + 12)) for node in nodes])
        times.append(round((proposer.busy_s - before) * 1e3, 6))

    expand(-1)  # children 1 and 2
    expand(1, 2)  # 21, 22; 31, 32
    first = say(1, 4, int(prompt[-1]), 1)[0]
    proposer.commit(1, np.array([first, 9], np.int32), [1])
    expand(-1)
    expand(-1)
    assert times[1:] == [4.0, 2.0, 1.0, 1.0]
    proposer.commit(1, np.array([7, 8, 9], np.int32), [])
    expand(-1)
    assert times[-1] == 3.0


def test_descendants_of_the_committed_stay_valid_and_cut_nodes_are_unknown(proposer):
    prompt = TEXT.prompt(1, 4)
    proposer.open(1, prompt, PARAMS)
    proposer.expand([Expansion(1, -1, (1,))])
    proposer.expand([Expansion(1, 1, (2,))])
    tokens = say(1, 4, int(prompt[-1]), 3)
    proposer.commit(1, np.array(tokens[:1], np.int32), [1])
    (children,) = proposer.expand([Expansion(1, 2, (3,))])
    assert children.token_ids.tolist() == tokens[2:]
    proposer.commit(1, np.array([9], np.int32), [])
    with pytest.raises(EngineError, match="unknown or was removed"):
        proposer.expand([Expansion(1, 3, (4,))])

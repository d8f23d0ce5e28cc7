"""Suffix decoding: what a session's text and earlier ones of its owner repeat, beside what drafters sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.drafting import suffix
from specq.drafting.suffix import DEPTH as SUFFIX_DEPTH
from specq.drafting.suffix import ReferenceTexts
from specq.drafting.suffix.shared_texts import TOKENS_AT_ONCE, SharedTexts
from specq.drafting.suffix.source import MOST_DEPTH, SuffixDecoder
from specq.protocol import SUFFIX_LANE, Close, Speculation
from specq.testing.conformance.sources import Serving
from specq.testing.toy import toy_text
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import DraftBatch, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Budget
from specq.verifier.trees import DraftTrees
from specq.verifier.trees.arrays import WINDOW
from tests.verifier.sessions import commit, graft, live_nodes, make_draft, make_session, observe, paths

PHRASE = list(range(10, 32))
CONTEXT = [*PHRASE, 1, 2, 3, *PHRASE[:3]]  # goes on, if it repeats itself, with 13, 14, ...
BUDGET = Budget(StepCurve([1, 8], [1.0, 1.0]), 0.1)


def reliable(session: Session) -> Session:
    """Return a session in which all that suffix decoding drafted was accepted, however unlikely it was thought to
    be."""
    for prob in np.arange(0.04, 1.0, 0.08).repeat(60).tolist():
        observe(session, SUFFIX_LANE, np.log(prob), accepted=True)
    return session


def draft(session: Session, source: SuffixDecoder | None = None) -> int:
    """Hang what the text repeats onto a session's tree; return how many nodes became live."""
    before = session.num_live
    for batch in (source or SuffixDecoder()).collect([session], BUDGET, lambda: 0.0):
        graft_batch(batch, 0.0)
    return session.num_live - before


def test_what_a_text_repeats_hangs_from_the_context() -> None:
    """In a lane of its own."""
    session = reliable(make_session(CONTEXT))
    assert draft(session) == MOST_DEPTH
    assert tuple(PHRASE[3 : 3 + MOST_DEPTH]) in paths(session)
    assert {node.lane for node in live_nodes(session)} == {SUFFIX_LANE}
    assert draft(session) == 0, "it is live already"


def test_a_text_that_went_on_in_two_ways_gives_a_tree() -> None:
    """Which of them comes oftener comes first."""
    session = reliable(make_session([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]))
    draft(session)
    firsts = [node.token for node in live_nodes(session) if node.parent is None]
    assert firsts[:2] == [4, 3]


@pytest.mark.parametrize(("probability", "is_hung"), [(0.03, True), (0.999, False)])
def test_it_is_hung_beside_a_draft_that_promises_less(probability: float, is_hung: bool) -> None:
    """One live node that is unlikely does not shut out a longer draft; a longer chain that is surer does."""
    session = reliable(make_session(CONTEXT))
    count = 1 if is_hung else 20
    rival = make_draft(len(CONTEXT), 0, list(range(40, 40 + count)), list(range(-1, count - 1)))
    graft(session, rival, 0.0)
    for _ in range(60):
        observe(session, 0, float(rival.scores[0]), accepted=bool(probability > 0.5))
    assert bool(draft(session)) == is_hung


def test_what_a_drafter_sent_already_is_not_hung_twice() -> None:
    """A token that is live stands for both, and the rest hangs below it."""
    session = reliable(make_session(CONTEXT))
    graft(session, make_draft(len(CONTEXT), 0, PHRASE[3:4], [-1]), 0.0)
    for _ in range(60):
        observe(session, 0, np.log(0.5), accepted=False)
    assert draft(session) == MOST_DEPTH - 1
    commit(session, PHRASE[3:6], 3)
    assert session.num_live == MOST_DEPTH - 3


@pytest.mark.parametrize(("tokens_left", "speculation", "most"), [(4, None, 3), (99, Speculation(max_nodes=5), 5)])
def test_a_draft_has_no_more_nodes_than_there_is_room_for(
    tokens_left: int, speculation: Speculation | None, most: int
) -> None:
    """Near the end of a text the correction takes the last token; and a job may ask for few nodes."""
    session = reliable(make_session(CONTEXT, tokens_left=tokens_left, speculation=speculation))
    assert draft(session) == most
    assert tuple(PHRASE[3 : 3 + most]) in paths(session)


# --- many sessions at once
# ----------------------------------------------------------------------------------------------


def reference_decoder() -> SuffixDecoder:
    """Return suffix decoding as it is where no C compiler is, without texts of earlier sessions."""
    source = SuffixDecoder()
    source._texts = ReferenceTexts()
    return source


@given(st.randoms(use_true_random=True))
@pytest.mark.parametrize("make_source", [SuffixDecoder, reference_decoder])
def test_many_sessions_have_the_drafts_of_each_alone(make_source: Callable[[], SuffixDecoder], random: Random) -> None:
    """Though they come, grow, are left out of steps, and go, and others take their places."""
    trees, together = DraftTrees(), make_source()
    alone, sessions = dict[int, SuffixDecoder](), dict[int, Session]()
    for turn in range(12):
        if len(sessions) < 5:
            text = [random.randrange(4) for _ in range(random.choice([3, 30]))]
            asked = random.choice([Speculation(), Speculation(max_nodes=3), Speculation(mode="plain")])
            sessions[turn] = make_session(text, trees=trees, session_id=turn, speculation=asked)
            alone[turn] = make_source()
        if random.random() < 0.2:
            gone = sessions.pop(random.choice(sorted(sessions)))
            together.close(gone)
            gone.close()
        asked_for = [session for session in sessions.values() if random.random() < 0.8]
        budget = Budget(StepCurve([1, 8], [1.0, 1.0]), random.choice([0.02, 0.4]))
        num_declined = trees.num_declined.copy()
        found = [drafted(alone[session.session_id].collect([session], budget, lambda: 0.0)) for session in asked_for]
        trees.num_declined[:] = num_declined
        batches = together.collect(asked_for, budget, lambda: 0.0)
        assert drafted(batches) == [one for own in found for one in own]
        for batch in batches:
            graft_batch(batch, 0.0)
        for session in asked_for:
            commit(session, [random.randrange(4) for _ in range(random.choice([1, 1, 6]))], session.num_live)


def drafted(batches: Sequence[DraftBatch]) -> list[tuple[object, ...]]:
    """Return the drafts of each session."""
    found, at = list[tuple[object, ...]](), 0
    for batch in batches:
        for session, size in zip(batch.sessions, np.asarray(batch.sizes).tolist(), strict=True):
            own = slice(at, at + size)
            columns = batch.token_ids[own], batch.parent_ids[own], batch.scores[own]
            found.append((session.session_id, session.length, *(column.tolist() for column in columns)))
            at += size
    return found


@pytest.mark.parametrize("make_source", [SuffixDecoder, reference_decoder])
def test_a_session_that_was_long_left_out_is_drafted_for(make_source: Callable[[], SuffixDecoder]) -> None:
    """More tokens were committed meanwhile than the draft trees keep: the text goes on as it did where they begin."""
    source, session = make_source(), reliable(make_session(CONTEXT, tokens_left=10 * WINDOW))
    assert draft(session, source) == MOST_DEPTH
    session.forget_drafts()
    commit(session, [*range(100, 100 + WINDOW), *PHRASE, *CONTEXT])
    assert draft(reliable(session), source) == MOST_DEPTH
    assert tuple(range(100, 100 + MOST_DEPTH)) in paths(session)


def test_a_session_that_takes_the_place_of_another_has_a_text_of_its_own() -> None:
    """No draft comes from the text of the other session."""
    trees, source = DraftTrees(), SuffixDecoder()
    first = make_session(CONTEXT, trees=trees)
    assert source.collect([first], BUDGET, lambda: 0.0)
    source.close(first)
    place = first.place
    first.close()
    later = reliable(make_session([5, *PHRASE[:4]], trees=trees))
    assert later.place == place
    assert not source.collect([later], BUDGET, lambda: 0.0)


def test_without_a_compiler_a_text_takes_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the same."""
    steps = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(suffix, "kernels", lambda: None)
        serving = Serving([SuffixDecoder(10_000)], lambda verifier: None)
        for i in range(6):
            serving.open(i, seed=i % 2)
            if i % 2:
                texts = serving.finish()
                assert [texts[i - 1], texts[i]] == [toy_text([5, 6, 7], 40, seed) for seed in (0, 1)]
                for ended in (i - 1, i):
                    serving.verifier.handle(Close(session_id=ended, epoch=1), 0.0)
        steps.append((serving.verifier.num_steps, serving.verifier.sources.num_sent["suffix"]))
    assert steps[0] == steps[1]
    assert steps[0][1] > 10


# --- texts of earlier sessions
# ------------------------------------------------------------------------------------------


def owned(session: Session, owner: str) -> Session:
    session.owner = owner
    return session


@pytest.mark.parametrize(
    ("owner", "shared_tokens", "is_drafted"), [("ann", 1000, True), ("bob", 1000, False), ("ann", 0, False)]
)
def test_only_texts_of_the_same_owner_are_drafted_from(owner: str, shared_tokens: int, is_drafted: bool) -> None:
    """And none where they are switched off."""
    source = SuffixDecoder(shared_tokens)
    earlier = owned(make_session([7, 8, 9]), "ann")
    source.collect([earlier], BUDGET, lambda: 0.0)
    commit(earlier, PHRASE, 0)
    source.close(earlier)
    source.begin((), BUDGET, 0.0)
    later = owned(reliable(make_session([5, *PHRASE[:4]], session_id=8)), owner)
    assert bool(draft(later, source)) == is_drafted
    assert (tuple(PHRASE[4:12]) in paths(later)) == is_drafted


def test_the_same_prompt_is_answered_from_the_first_token_on() -> None:
    """By what followed the end of the prompt, though the rest of the prompt is not kept."""
    prompt = list(range(100, 160))
    texts = SharedTexts(1000)
    texts.add("ann", [*prompt, *PHRASE], len(prompt))
    texts.grow()
    (tree,) = texts.trees("ann")
    assert tree.num_tokens == SUFFIX_DEPTH + len(PHRASE) + 1


def test_a_second_serving_of_a_job_takes_fewer_steps() -> None:
    """Through a verifier, whose texts stay the target's."""
    serving = Serving([SuffixDecoder(10_000)], lambda verifier: None)
    steps = []
    for i in (0, 1):
        before = serving.verifier.num_steps
        serving.open(i)
        assert serving.finish()[i] == toy_text([5, 6, 7], 40)
        serving.verifier.handle(Close(session_id=i, epoch=1), 0.0)
        steps.append(serving.verifier.num_steps - before)
    assert steps[1] < steps[0] - 10


def test_texts_are_bounded_in_tokens() -> None:
    """Of one owner, the older half goes; of several, who was served longest ago loses all; what is too long is not
    kept."""
    random, texts = Random(1), SharedTexts(8000)
    for i in range(40):
        texts.add("ann" if i % 2 else "bob", [random.randrange(500) for _ in range(1500)], 3)
        while texts._num_waiting:
            texts.grow()
        assert texts.num_tokens <= 8000
    assert texts.trees("ann")
    texts.add("eve", [1] * 5000, 3)
    texts.grow()
    assert not texts.trees("eve")


def test_owners_are_bounded_however_short_their_texts() -> None:
    """Without keys a client may name another tenant in each job, and each tree takes some memory."""
    texts = SharedTexts(8000)
    for i in range(500):
        texts.add(f"/tenant-{i}", [5, 6, 7, i], 3)
        texts.grow()
    assert 0 < len(texts._owners) <= 8000 // 256
    assert texts.trees("/tenant-499")
    assert not texts.trees("/tenant-0")


def test_what_is_too_much_at_once_is_taken_in_by_parts() -> None:
    """So that no step waits long; and what waits is bounded, too."""
    texts = SharedTexts(8 * TOKENS_AT_ONCE)
    for _ in range(5):
        texts.add("ann", list(range(3 * TOKENS_AT_ONCE)), SUFFIX_DEPTH)
    assert texts._num_waiting == 6 * TOKENS_AT_ONCE
    for expected in (1, 2, 3):
        texts.grow()
        assert texts.trees("ann")[0].num_tokens // TOKENS_AT_ONCE == expected


def test_sessions_without_drafts_are_not_stored() -> None:
    """Jobs in mode plain ask for no speculation of any kind."""
    source = SuffixDecoder(1000)
    session = make_session(CONTEXT, speculation=replace(Speculation(), mode="plain"))
    assert not source.collect([session], BUDGET, lambda: 0.0)
    source.close(session)
    source.begin((), BUDGET, 0.0)
    assert not source._shared.trees(session.owner)

"""An EAGLE-3 head's own contexts and trees: after any history, its output equals plain arithmetic on the same path.

In the shapes that are needed; in recorded ones, with a stand-in that replays what it was first given; by kernels of our
own, under Triton's interpreter (TRITON_INTERPRET=1); and from CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specq.drafting import draws_children
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.host import HostEagle
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.rank_trees import RankTree, tree_for
from specq.drafting.trees import texts as module
from specq.drafting.trees.interface import TreeRequest
from specq.protocol import SamplingParams, Speculation
from specq.testing.growth import grow
from specq.verifier.sources import Followed
from tests.drafting.eagle3.plain_eagle import (
    EVERYTHING,
    GREEDY,
    SAMPLED,
    Known,
    Plainly,
    Text,
    check,
    head,
    made,
    observe,
    plain,
    scores_of,
    target,
)

__all__ = ["head", "made", "plain", "target"]  # fixtures


CUT = replace(SAMPLED, top_k=3)


FIXED = tree_for(Speculation(tree=((0, 0, 0), (0, 2), (1, 1, 0), (9,))), 8)


@pytest.mark.parametrize("most_rows", [1, 4, 512])
def test_rows_are_those_of_plain_arithmetic(
    head: Eagle | HostEagle, plain: EagleHead, monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """Several texts of different lengths in one batch, added at once or in parts, in passes of a fixed number of
    rows."""
    monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    one, other, third = Text(1, 30), Text(2, 30), Text(3, 30)
    observe(head, torch.cat([one.states, other.states]), [one.part(1, 1, 9), other.part(2, 1, 4, offset=30)])
    check(head, plain, {1: (one, 9, 1), 2: (other, 4, 1)})
    observe(head, third.states, [third.part(3, 1, 20)])
    observe(head, one.states, [one.part(1, 9, 10)])
    observe(head, other.states, [other.part(2, 4, 7)])
    check(head, plain, {3: (third, 20, 1), 1: (one, 10, 1), 2: (other, 7, 1)})


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(None, ()), (FIXED, ()), (None, (3, 5, 2))], ids=["best first", "of a shape", "of level sizes"]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, CUT], ids=["greedy", "sampled", "cut"])
def test_trees_equal_those_of_plain_expansion(
    head: Eagle | HostEagle, plain: EagleHead, params: SamplingParams, ranks: RankTree | None, sizes: tuple[int, ...]
) -> None:
    """For texts of several lengths, then for one of them and others of the same shapes, without state of the last
    batch."""
    texts = [Text(seed, 20) for seed in range(3)]
    mixed = [params, replace(params, seed=5), GREEDY]
    for i, (text, end) in enumerate(zip(texts, (9, 4, 6), strict=True)):
        observe(head, text.states, [text.part(i, 1, end)])
    known: Known = {0: (texts[0], 9, 1), 1: (texts[1], 4, 1), 2: (texts[2], 6, 1)}
    check(head, plain, known, mixed, depth=3, ranks=ranks, sizes=sizes)
    check(head, plain, {1: known[1]}, mixed[1:2], depth=3, ranks=ranks, sizes=sizes)
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 11)])
    check(
        head,
        plain,
        {2: (texts[2], 11, 1), 0: (texts[0], 11, 1), 1: (texts[1], 11, 1)},
        mixed,
        depth=3,
        ranks=ranks,
        sizes=sizes,
    )


def test_requests_of_several_kinds_are_answered_together(head: Eagle | HostEagle, plain: EagleHead) -> None:
    texts = [Text(seed, 20) for seed in range(3)]
    for i, text in enumerate(texts):
        observe(head, text.states, [text.part(i, 1, 5 + i)])
    known: list[Known] = [{0: (texts[0], 5, 1), 2: (texts[2], 7, 1)}, {1: (texts[1], 6, 1)}]
    requests = [
        TreeRequest([0, 2], [GREEDY, SAMPLED], 2, None, EVERYTHING),
        TreeRequest([1], [SAMPLED], 3, FIXED, EVERYTHING),
    ]
    pending = head.start(requests)
    for own, request, one in zip(known, requests, pending, strict=True):
        found, expected = one.collect(), grow(Plainly(plain, own, request.params), request)
        for tree in range(len(own)):
            assert scores_of(expected, tree).keys() == scores_of(found, tree).keys()


@pytest.mark.parametrize("head", ["as needed", "without torch"], indirect=True)
def test_what_is_less_likely_than_the_floor_may_be_left_out(head: Eagle | HostEagle) -> None:
    """Where levels are computed one by one, levels below the floor are not computed."""
    text = Text(1, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    sizes = []
    for floor in (EVERYTHING, float(np.log(0.3))):
        (pending,) = head.start([TreeRequest([1], [GREEDY], 6, None, floor)])
        sizes.append(pending.collect().depths.max() + 1)
        first = pending.collect().scores[0, pending.collect().depths == 0].max()
    assert first < np.log(0.99)
    assert sizes[0] == 6 > sizes[1]


def test_trees_leave_no_state(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """A tree without a commit, and one text asked twice without new tokens."""
    text = Text(4, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    for end in (9, 9, 13):
        observe(head, text.states, [text.part(1, 9, end)] if end > 9 else [])
        check(head, plain, {1: (text, end, 1)})


def test_what_is_known_is_skipped_and_a_gap_begins_anew(head: Eagle | HostEagle, plain: EagleHead) -> None:
    text = Text(5, 40)
    observe(head, text.states, [text.part(1, 4, 9)])  # the engine had the beginning in its cache
    check(head, plain, {1: (text, 9, 4)})
    observe(head, text.states, [text.part(1, 6, 12)])  # an evicted session's prompt comes again
    assert head.known(1) == 12
    check(head, plain, {1: (text, 12, 4)})
    observe(head, text.states, [text.part(1, 20, 30)])
    assert head.known(1) == 30
    check(head, plain, {1: (text, 30, 20)})
    observe(head, text.states, [text.part(1, 6, 12)])
    assert head.known(1) == 30


def test_rows_of_many_steps_are_taken_in_at_once(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """Where no tree was asked for meanwhile, each step's states in memory of their own."""
    text = Text(5, 90)
    for end in range(2, 80):
        observe(head, text.states[end - 2 : end - 1].clone(), [Followed(1, end - 1, [text.token_ids[end - 1]], [0])])
    check(head, plain, {1: (text, 79, 1)}, depth=1)


def test_rows_of_texts_in_one_step_are_kept_apart(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """Each step has rows of all texts, as where prompts are computed in parts: what one text waits for lies apart."""
    texts = [Text(seed, 40) for seed in range(3)]
    for first, end in ((1, 9), (9, 12), (12, 21)):
        values = torch.cat([text.states[first - 1 : end - 1] for text in texts])
        count = end - first
        observe(
            head,
            values,
            [
                Followed(i, first, text.token_ids[first:end], range(i * count, (i + 1) * count))
                for i, text in enumerate(texts)
            ],
        )
    check(head, plain, {i: (text, 21, 1) for i, text in enumerate(texts)})


@pytest.mark.slow
def test_places_are_used_again(head: Eagle | HostEagle, plain: EagleHead) -> None:
    """By sessions that come and go; what the one before left is not seen."""
    long, short = Text(6, 300), Text(7, 10)
    for session_id in range(5):
        text, end = (long, 290) if session_id % 2 == 0 else (short, 6)
        observe(head, text.states, [text.part(session_id, 1, end)])
        check(head, plain, {session_id: (text, end, 1)})
        head.close(session_id)
        assert head.known(session_id) == 0
    head.close(77)


def test_a_text_that_is_too_long_is_known_from_later_on(
    head: Eagle | HostEagle, plain: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no tree was requested for long, and if its keys would take too much memory."""
    text = Text(8, 60)
    monkeypatch.setattr(module, "MOST_WAITING", 20)
    observe(head, text.states, [text.part(1, 1, 31)])
    assert head.known(1) == 31
    check(head, plain, {1: (text, 31, 21)})
    monkeypatch.setattr(type(head.cache), "most_rows", 16)
    observe(head, text.states, [text.part(1, 31, 43)])
    check(head, plain, {1: (text, 43, 35)})


def test_tokens_are_ranked_with_the_jobs_own_noise(head: Eagle | HostEagle) -> None:
    """At a temperature, by place; but not where the verifier draws by itself."""
    text = Text(9, 20)
    observe(head, text.states, [text.part(1, 1, 9)])
    drawn = replace(SAMPLED, strategy="probabilistic")
    assert draws_children(drawn)
    found = [
        head.start([TreeRequest([1], [params], 1, None, EVERYTHING)])[0].collect().token_ids[:, :8].tolist()
        for params in (GREEDY, SAMPLED, replace(SAMPLED, seed=4), drawn, SAMPLED)
    ]
    assert found[0] == found[3] != found[1] != found[2]
    assert found[1] == found[4]

"""The distribution of `probabilistic`'s text, with the real broker, session tree, scheduler, drafter and judge between.

The target is memoryless: each token is drawn from the same distribution, so that one long job gives thousands of draws.
What is wrong in the cutting, the order or the distributions of sampled nodes shows in the frequencies of tokens and of
pairs of tokens; the bugs that are planted below do.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting import Children, Expansion
from specq.protocol.arrays import Int32Array
from specq.protocol.params import Speculation
from specq.protocol.step_output import NO_TAP, StepOutput, Tap
from specq.protocol.types import DraftDistribution, SessionStep
from specq.testing.toy import VOCAB, ToyEngine
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World
from specq.verification.drafting import draw_children
from specq.verification.judge import judge
from specq.verifier.sessions.session import Session
from specq.verifier.step import node_choice
from specq.verifier.step.choice_order import order_of_choice
from specq.verifier.trees import draft_trees, reference_choice

TARGET = np.array([0.0, 0.35, 0.2, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02])  # of tokens 0 to 8; 0 ends a text
NUM_TOKENS = 1500
LIMIT = 45.0  # of chi-square with at most 7 degrees of freedom; and of pairs with 49: 120
PAIR_LIMIT = 120.0


class MemorylessEngine(ToyEngine):
    """An engine whose logits are the same in every row."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        self.num_rows.append(sum(step.num_rows for step in steps))
        self.busy_s += self.step_times(self.num_rows[-1:])[0]
        logits = torch.full((sum(step.num_judged_rows for step in steps), VOCAB), -torch.inf)
        logits[:, : len(TARGET)] = torch.from_numpy(np.log(TARGET, where=TARGET > 0, out=np.full(9, -np.inf)))
        judgements = judge(steps, logits)
        for step in steps:
            self.contexts[step.session_id].extend(step.token_ids.tolist())
        for judgement in judgements:
            self.contexts[judgement.session_id].extend(judgement.token_ids[:-1].tolist())
        return StepOutput(judgements)


class DrawingProposer(ToyProposer):
    """Draws children from one distribution in any context."""

    def __init__(self, weights: Sequence[int]) -> None:
        super().__init__()
        self.distribution = DraftDistribution(np.arange(1, 9, dtype=np.int32), np.array(weights, np.uint16))

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        self.busy_s += self.pass_s
        most = max(len(request.child_ids) for request in requests)
        own = self.distribution
        ids, weights = (np.tile(part, (len(requests), 1)) for part in (own.ids, own.weights))
        drawn = draw_children(ids, weights, most, self.random)
        answers = []
        for request, tokens, scores in zip(requests, drawn.token_ids, drawn.scores, strict=True):
            count = min(len(request.child_ids), int((tokens >= 0).sum()))
            path = self.nodes[request.session_id][request.node_id]
            for node_id, token in zip(request.child_ids, tokens[:count].tolist(), strict=False):
                self.nodes[request.session_id][node_id] = [*path, token]
            answers.append(Children(tokens[:count], scores[:count], DraftDistribution(ids[0], weights[0])))
        return answers


DRAFTS = {
    "good": [350, 220, 140, 100, 80, 50, 40, 20],
    "bad": [20, 30, 60, 100, 150, 200, 240, 200],
    "sharp": [900, 10, 30, 20, 20, 10, 5, 5],
}
SHAPES = {
    "best-first": Speculation(),
    "chain": Speculation(num_candidates=1, max_depth=4),
    "candidates": Speculation(mode="sync", num_candidates=3, max_depth=3),
    "budget": Speculation(mode="sync", max_nodes=7),
    "just in time": Speculation(mode="jit", fan_out_hit=(2, 1), fan_out_miss=(3, 2, 1), max_depth=3),
}


def text_of(draft: str, speculation: Speculation, **options: bool) -> tuple[list[int], dict[str, int]]:
    """Return one long text and the statistics of its job."""
    world = World()
    world.add_verifier(engine=MemorylessEngine(), **options)
    world.add_drafter(proposer=DrawingProposer(DRAFTS[draft]), fan_out=3)
    world.run(0.1)
    tokens: list[int] = []
    stats = {"draft_tokens": 0, "accepted_tokens": 0}
    for job_id in range(1, 3):
        job = world.submit(
            job_id, [5, 6, 7], speculation=speculation, strategy="probabilistic", temperature=1.0, seed=job_id,
            max_tokens=NUM_TOKENS // 2,
        )  # fmt: skip
        world.run_until(lambda: bool(job.finish), limit_s=3000)  # noqa: B023
        tokens += job.token_ids
        stats = {name: count + int(job.stats[name]) for name, count in stats.items()}  # type: ignore[call-overload]
    return tokens, stats


def chi_squares(tokens: Sequence[int]) -> tuple[float, float]:
    """Return chi-square of the tokens' frequencies, and of their pairs', against the target's distribution."""
    distribution = TARGET[1:]
    singles = np.bincount(np.array(tokens) - 1, minlength=8)
    expected = distribution * len(tokens)
    pairs = np.bincount((np.array(tokens[:-1]) - 1) * 8 + np.array(tokens[1:]) - 1, minlength=64).reshape(8, 8)
    wanted = np.outer(distribution, distribution) * (len(tokens) - 1)
    return float(((singles - expected) ** 2 / expected).sum()), float(((pairs - wanted) ** 2 / wanted).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "shape"), [("good", "best-first"), ("bad", "candidates"), ("sharp", "chain"), ("sharp", "budget")]
)
def test_the_text_has_the_targets_distribution(draft: str, shape: str) -> None:
    """Whatever the drafter's distribution and the shape of its trees."""
    tokens, stats = text_of(draft, SHAPES[shape])
    assert stats["draft_tokens"] > stats["accepted_tokens"] > 50
    singles, pairs = chi_squares(tokens)
    assert singles < LIMIT
    assert pairs < PAIR_LIMIT


@pytest.mark.slow
def test_stripped_lanes_keep_the_distribution_for_any_claim() -> None:
    """A drafter that always says its own favourite, and claims to have drawn it, biases a verifier that believes it;
    one that does not trust its drafters is not misled."""

    class Liar(DrawingProposer):
        def expand(self, requests: Sequence[Expansion]) -> list[Children]:
            answers = super().expand(requests)
            tokens: Int32Array = np.array([7], np.int32)
            for request in requests:
                self.nodes[request.session_id][request.child_ids[0]][-1:] = [7]
            return [Children(tokens, answer.scores[:1], answer.distribution) for answer in answers]

    def run(*, trusting: bool) -> float:
        world = World()
        world.add_verifier(engine=MemorylessEngine(), trust_drafts=trusting)
        world.add_drafter(proposer=Liar(DRAFTS["good"]), fan_out=1)
        world.run(0.1)
        job = world.submit(1, [5], strategy="probabilistic", temperature=1.0, max_tokens=800)
        world.run_until(lambda: bool(job.finish), limit_s=3000)
        assert job.stats["draft_tokens"]
        return chi_squares(job.token_ids)[0]

    assert run(trusting=False) < LIMIT
    assert run(trusting=True) > LIMIT


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are only slowed down by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _cut_by_content(t: Any, siblings: Sequence[int], reach_prob: float) -> list[int]:
    for node in siblings:
        t.reach_prob[node] = reach_prob * (0.9 if t.token[node] <= 3 else 0.0)
    return sorted(siblings, key=lambda node: -t.reach_prob[node])


def _last_first(session: Session, nodes: Sequence[int]) -> list[int]:
    t = session.trees.views
    return sorted(order_of_choice(session, nodes), key=lambda node: (t.position[node], -t.rank[node]))


def _first_cut(t: Any, siblings: Sequence[int], reach_prob: float) -> list[int]:
    for node in siblings:
        t.reach_prob[node] = reach_prob * 0.5
    return list(siblings[1:])


BUGS = {
    "cut by their own token": (reference_choice, "weighed", _cut_by_content),
    "judged in another order than drawn": (node_choice, "order_of_choice", _last_first),
    "without earlier siblings": (reference_choice, "weighed", _first_cut),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_show(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled nodes; in the frequencies of tokens."""
    monkeypatch.setattr(draft_trees, "kernels", lambda: None)  # the reference, in which the bug is
    monkeypatch.setattr(*BUGS[bug])
    tokens, _ = text_of("sharp", SHAPES["candidates"])
    assert chi_squares(tokens)[0] > LIMIT

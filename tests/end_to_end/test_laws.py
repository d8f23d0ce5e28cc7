"""The law of the text, over real sockets: a broker, verifiers and draft workers as processes, the target's law known.

Three drafters in turn: a good one, a bad one, and a hostile one (`tests.end_to_end.hostile`), which `probabilistic`
meets with its laws stripped. Texts are held against the exact law by chi-square tests, single tokens and successive
ones, at p > 1e-6; all texts of `probabilistic` together would show a bias of 3%, and a test shows that they would.

`deterministic` has fixed seeds, so its tests pass always or never. `probabilistic` draws with the drafters' own
randomness.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from specq import Client
from specq.client.result import Result
from specq.config.values import free_address
from specq.runtime.usage import reap
from tests.end_to_end.hostile import Hostile
from tests.end_to_end.memoryless import (
    MARKOV,
    MEMORYLESS,
    bad_logits,
    distribution_p_value,
    exact_distributions,
    good_logits,
    leaked,
    target_logits,
    transition_p_value,
    write_checkpoint,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
READY_S = 120
ROOT = Path(__file__).parents[2]
LEAST_P = 1e-6

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"mode": "plain"},
    "best-first": {},
    "rounds": {"mode": "sync"},
    "chain": {"mode": "sync", "num_candidates": 1, "max_depth": 4},
    "candidates": {"mode": "sync", "num_candidates": 3, "max_depth": 2},
    "tree": {"mode": "sync", "tree": [[0, 0, 0], [0, 1], [1, 0], [2]]},
    "just-in-time": {"mode": "jit", "fan_out_hit": [2, 1, 1], "fan_out_miss": [2, 1], "max_depth": 3},
}


# What a verifier that drafts without a draft model is asked for.
WITHOUT_MODEL = {
    "suffix": ("--drafts", "always", "--shared-tokens", "100000"),
    "lookahead": ("--drafts", "always", "--prompt-lookup", "none", "--lookahead"),
    "both": ("--drafts", "always", "--lookahead", "--shared-tokens", "100000", "--lookahead-window", "6"),
}


@dataclass(frozen=True)
class Case:
    """Who drafts for which strategy, and in which shape."""

    strategy: str
    drafter: str
    shape: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.drafter}-{self.shape}"


def _lossless(strategy: str) -> list[Case]:
    shapes = ("best-first", "chain", "candidates", "tree", "just-in-time")
    cases = [Case(strategy, drafter, shape) for drafter in ("good", "bad") for shape in shapes]
    return [*cases, Case(strategy, "hostile", "chain")]  # whose trees have the shapes that it likes


def _own(strategy: str) -> list[Case]:
    """A verifier that drafts for itself: with a draft model; from texts that are there; what further rows of its steps
    say."""
    own = [Case(strategy, drafter, shape) for drafter in ("own-good", "own-bad") for shape in ("best-first", "rounds")]
    return [*own, *(Case(strategy, drafter, "best-first") for drafter in ("suffix", "lookahead", "both"))]


PLAIN = Case("deterministic", "nobody", "plain")
DETERMINISTIC = [*_own("deterministic"), *_lossless("deterministic")]
PROBABILISTIC = [*_own("probabilistic"), *_lossless("probabilistic")]
LOSSY = [
    Case(strategy, "own-bad", "candidates") for strategy in ("threshold", "typical")
]  # never late, so always biased
FORGED = Case("probabilistic", "liar", "chain")


@dataclass(frozen=True, eq=False)
class Block:
    """A part of the vocabulary, what is sampled there, and in how many jobs of how many tokens."""

    tokens: slice
    sampling: dict[str, Any]
    num_jobs: int
    num_tokens: int
    bias: float  # that all texts of a strategy together show

    @property
    def prompt(self) -> list[int]:
        return [self.tokens.start + 1]

    @cached_property
    def distributions(self):
        return exact_distributions(target_logits(), **self.sampling)

    @cached_property
    def biased_distributions(self):
        return leaked(self.distributions, exact_distributions(bad_logits(), **self.sampling), self.bias)

    def jobs(self, case: Case) -> Iterator[dict[str, Any]]:
        """Yield the arguments of each job: texts that are compared have the same seeds, others have seeds of their
        own."""
        first = 100 * (1 + PROBABILISTIC.index(case)) if case in PROBABILISTIC else 0
        num_tokens = SAME if case in (*DETERMINISTIC, FORGED) else self.num_tokens * (1 + 2 * (case in LOSSY))
        for seed in range(first, first + self.num_jobs):
            yield {"token_ids": self.prompt, "seed": seed, "max_tokens": num_tokens, **self.sampling}


ONE_DISTRIBUTION = Block(MEMORYLESS, {"temperature": 0.9}, num_jobs=6, num_tokens=200, bias=0.03)
BY_TOKEN = Block(MARKOV, {"temperature": 1.0, "top_k": 8, "top_p": 0.95}, num_jobs=2, num_tokens=120, bias=0.1)
SAME = 40  # tokens of a job whose text is only compared, or plainly wrong
MOST_RUNS = 12
BLOCKS = (ONE_DISTRIBUTION, BY_TOKEN)
Texts = dict[Block, list[list[int]]]


# --- serving ------------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """What was said in each case, and what drafting came to."""

    texts: dict[Case, Texts] = field(default_factory=dict)
    counts: dict[Case, dict[str, int]] = field(default_factory=dict)
    seeds: dict[Case, list[int]] = field(default_factory=dict)  # that the hostile drafter received

    def run(self, client: Client, *cases: Case, blocks: Sequence[Block] = BLOCKS) -> None:
        """Serve all jobs of a case at a time, case after case, until there was something to judge."""
        for case in cases:
            self.run_until(self.has_something_to_judge, client, case, blocks)

    def run_until(
        self, is_enough: Callable[[Case], bool], client: Client, case: Case, blocks: Sequence[Block] = BLOCKS
    ) -> None:
        """Serve a case again where drafts were too late, on a busy machine, for a text that says something."""
        for _ in range(MOST_RUNS):
            options = {"strategy": case.strategy, "ignore_eos": True, **SHAPES[case.shape]}
            jobs = [(block, client.submit(**job, **options)) for block in blocks for job in block.jobs(case)]
            results = [(block, job.result(120)) for block, job in jobs]
            self.texts[case] = {block: [r.token_ids for at, r in results if at is block] for block in blocks}
            self.counts[case] = _counts([result for _, result in results])
            if is_enough(case):
                return

    def has_something_to_judge(self, case: Case) -> bool:
        counts = self.counts[case]
        return case == PLAIN or (
            min(counts["accepted"], counts["rejected"]) > 0
            and (case.shape == "best-first" or self.has_much_to_judge(case))
        )

    def has_much_to_judge(self, case: Case) -> bool:
        accepted, rejected, rounds = (self.counts[case][name] for name in ("accepted", "rejected", "rounds"))
        return accepted + rejected > rounds / 4 and min(accepted, rejected) > 10


def _counts(results: list[Result]) -> dict[str, int]:
    rounds, verified, accepted = (
        sum(result.stats[name] for result in results) for name in ("rounds", "draft_tokens", "accepted_tokens")
    )
    return {"rounds": rounds, "accepted": accepted, "rejected": verified - accepted}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Serve everything once; the tests only look at it."""
    folder, address, found = tmp_path_factory.mktemp("toy"), free_address(), Said()
    targets = [write_checkpoint(folder / name, target_logits()) for name in ("trusting", "stripping")]
    good = write_checkpoint(folder / "good", good_logits())
    bad = write_checkpoint(folder / "bad", bad_logits())
    with (
        _process("broker", "--bind", address, "--journal", "none"),
        _worker("target", address, targets[0], "--drafts", "always"),
        _worker("target", address, targets[1], "--drafts", "always", "--no-trust-drafts"),
        Client(address, model=targets[0], timeout_s=READY_S) as trusting,
        Client(address, model=targets[1], timeout_s=READY_S) as stripping,
    ):
        with _worker("draft", address, good):
            _wait_for(trusting, good)
            found.run(trusting, *(case for case in DETERMINISTIC + PROBABILISTIC if case.drafter == "good"))
        with _worker("draft", address, bad):
            found.run(trusting, PLAIN)  # meanwhile
            _wait_for(trusting, bad)
            found.run(trusting, *(case for case in DETERMINISTIC + PROBABILISTIC if case.drafter == "bad"))
        for case in (DETERMINISTIC[-1], PROBABILISTIC[-1]):
            with Hostile(address, trusting.model, "hostile") as hostile:
                _wait_for(stripping, "hostile")
                found.run_until(found.has_much_to_judge, stripping, case)
                found.seeds[case] = hostile.seeds
        with Hostile(address, trusting.model, "liar", lies_only=True):
            _wait_for(trusting, "liar")
            found.run(trusting, FORGED, blocks=(ONE_DISTRIBUTION,))
    models = {"own-good": ("--draft-model", good), "own-bad": ("--draft-model", bad)}
    for name, options in (models | WITHOUT_MODEL).items():
        with (
            _process("broker", "--bind", address, "--journal", "none"),
            _worker("target", address, targets[0], *options),
            Client(address, model=targets[0], timeout_s=READY_S) as client,
        ):
            client.wait_until_ready(num_drafters=0, timeout_s=READY_S)
            found.run(client, *(case for case in DETERMINISTIC + PROBABILISTIC if case.drafter == name))
            found.run(client, *(case for case in LOSSY if case.drafter == name), blocks=(ONE_DISTRIBUTION,))
    return found


@contextmanager
def _process(*arguments: str, program: str = "specq") -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", program, *arguments, "--log-level", "error"], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        reap(process, 10)


def _worker(role: str, address: str, model: str, *options: str) -> AbstractContextManager[None]:
    """Start a worker that is named after its model; a target with the steps of a large one."""
    named = ("--role", role, "--broker", address, "--model", model, "--name", model, "--threads", "1")
    if role == "target":
        return _process("worker", *named, "--engine", "slow", *options, program="tests.end_to_end.slow_target")
    return _process("worker", *named, "--nice", "0", *options)


def _wait_for(client: Client, drafter: str) -> None:
    """Wait until both targets are ready, and this drafter and no other."""
    deadline = time.monotonic() + READY_S
    while True:
        workers = client.status()["workers"]
        drafters = [worker["name"] for worker in workers if worker["role"] == "draft"]
        if len(workers) == 3 and drafters == [drafter] and all(worker["state"] == "ready" for worker in workers):
            return
        assert time.monotonic() < deadline, workers
        time.sleep(0.02)


# --- lossless -----------------------------------------------------------------------------------------------------


def _p_values(texts: Texts) -> dict[str, float]:
    """Return p-values: of single tokens against the one law, and of what follows each token."""
    found = {str(block.tokens): transition_p_value(block.prompt, texts[block], block.distributions) for block in texts}
    return found | {
        "tokens": distribution_p_value(
            texts[ONE_DISTRIBUTION], ONE_DISTRIBUTION.distributions[ONE_DISTRIBUTION.prompt[0]]
        )
    }


def _together(said: Said) -> Texts:
    """Return the texts of all cases of `probabilistic`."""
    return {block: [text for case in PROBABILISTIC for text in said.texts[case][block]] for block in BLOCKS}


@pytest.mark.parametrize("case", DETERMINISTIC + PROBABILISTIC, ids=str)
def test_drafts_are_accepted_and_rejected(said: Said, case: Case) -> None:
    """There is something to judge, and much of it where the verifier waits for drafts: else the other tests say
    nothing."""
    counts = said.counts[case]
    assert said.has_something_to_judge(case), counts


def test_plain_text_has_the_targets_distribution(said: Said) -> None:
    """Without drafts: what all texts of `deterministic` are compared with."""
    p_values = _p_values(said.texts[PLAIN])
    assert min(p_values.values()) > LEAST_P, p_values


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_deterministic_text_is_the_same_with_any_drafter(said: Said, case: Case) -> None:
    """Token for token what is said without drafts, so that its law is that of the test above."""
    for block, texts in said.texts[PLAIN].items():
        assert said.texts[case][block] == [text[:SAME] for text in texts]


@pytest.mark.parametrize("case", PROBABILISTIC, ids=str)
def test_probabilistic_text_has_the_targets_distribution(said: Said, case: Case) -> None:
    """Sampled from laws that travel, or stripped to point masses: each token's law, and its law after the one
    before."""
    p_values = _p_values(said.texts[case])
    assert min(p_values.values()) > LEAST_P, p_values


def test_all_probabilistic_texts_have_the_targets_distribution(said: Said) -> None:
    """Nothing shows in all cases together either."""
    p_values = _p_values(_together(said))
    assert min(p_values.values()) > LEAST_P, p_values


def test_drafters_do_not_receive_the_seed_of_probabilistic(said: Said) -> None:
    """The seed reveals the draws of the verifier."""
    assert set(said.seeds[DETERMINISTIC[-1]]) == set(range(6))
    assert set(said.seeds[PROBABILISTIC[-1]]) == {0}


# --- the tests' power ---------------------------------------------------------------------------------------------


def test_a_small_bias_would_show(said: Said) -> None:
    """The same texts do not have laws that are a little biased towards a draft's."""
    texts = _together(said)
    assert (
        distribution_p_value(texts[ONE_DISTRIBUTION], ONE_DISTRIBUTION.biased_distributions[ONE_DISTRIBUTION.prompt[0]])
        < LEAST_P
    )
    assert transition_p_value(BY_TOKEN.prompt, texts[BY_TOKEN], BY_TOKEN.biased_distributions) < LEAST_P


@pytest.mark.parametrize("case", [*LOSSY, FORGED], ids=str)
def test_what_is_biased_is_found_out(said: Said, case: Case) -> None:
    """A lossy strategy. Also forged laws, known to the stripping verifier, at a verifier that trusts them."""
    assert (
        distribution_p_value(
            said.texts[case][ONE_DISTRIBUTION], ONE_DISTRIBUTION.distributions[ONE_DISTRIBUTION.prompt[0]]
        )
        < LEAST_P
    )

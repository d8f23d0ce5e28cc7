"""CONTRIBUTING.md is true: its examples, installed as a package of their own, do what every strategy, proposer, engine and
journal must do; the files and commands that it names exist."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specq.engines import ENGINES
from specq.journal.interface import JOURNALS
from specq.proposers import PROPOSERS, Expansion
from specq.protocol import SamplingParams, SessionStep, Tree
from specq.testing import oracle
from specq.testing.random_steps import packed_logits, sampling_params, split, steps
from specq.verification import strategy
from specq.verification.judge import judge
from specq.verifier import StepCurve, Verifier
from tests.engines.test_conformance import (  # noqa: F401 - they run here with the engine of the page
    test_a_session_opens_once_and_closes_quietly,
    test_a_step_of_only_prefill_judges_nothing,
    test_drafts_change_speed_and_never_text,
    test_free_slots_come_back,
    test_open_leaves_at_least_the_last_token_to_compute,
    test_step_times_has_one_time_a_size,
    test_too_many_rows_are_refused_with_nothing_changed,
)
from tests.journal.test_conformance import (  # noqa: F401 - with the journal of the page
    _open_it,
    test_a_frozen_owner_is_shut_out,
    test_a_group_that_cannot_be_written_leaves_nothing,
    test_a_reader_sees_what_is_written_while_it_is_open,
    test_an_id_that_comes_again_begins_anew,
    test_crashes_of_a_job_are_kept,
    test_epochs_rise_with_each_owner,
    test_free_room_is_given_back_until_there_is_none,
    test_it_holds_what_was_written,
    test_one_broker_owns_it,
    test_results_are_forgotten_by_age_then_by_size,
    test_tokens_that_are_written_twice_change_nothing,
)
from tests.plugins.conftest import install, site  # noqa: F401
from tests.proposers.test_conformance import (  # noqa: F401 - with the proposer of the page
    test_a_correction_starts_anew,
    test_answers_come_in_order_and_within_bounds,
    test_closing_is_quiet_and_allows_opening_again,
    test_descendants_of_the_last_committed_node_stay_valid,
    test_grown_ahead_or_one_commit_at_a_time_gives_the_same_drafts,
    test_siblings_differ,
)
from tests.verifier.test_verifier import PROMPT, chain, open_session, step

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
(TOML,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def extras(site, monkeypatch):  # noqa: F811 - the fixture imported above
    """The page's examples, installed as the package `extras`."""
    for path, code in BLOCKS.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(code, "utf-8")
        monkeypatch.delitem(sys.modules, _module(path), raising=False)
    install(site, "extras", tomllib.loads(TOML)["project"]["entry-points"])
    monkeypatch.setitem(JOURNALS, "memory", "extras.memory_journal:MemoryJournal")


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@pytest.fixture
def proposer(extras):
    return PROPOSERS.resolve("bigram").make()


@pytest.fixture
def engine(extras):
    return ENGINES.resolve("doubling").make("", kv_slots=512)


@pytest.fixture
def address(extras, tmp_path) -> str:
    return f"memory://{tmp_path}"


# --- the examples -----------------------------------------------------------------------------------------------------


def test_every_block_is_an_example_that_runs():
    assert sorted(BLOCKS) == [f"extras/{name}.py" for name in ("bigram", "doubling", "memory_journal", "plausible")]
    assert PAGE.count("```python") == len(BLOCKS)


@pytest.mark.usefixtures("extras")
@pytest.mark.parametrize(("token", "path", "expected"), [(1, (0,), [1, 3]), (2, (), [0])])
def test_the_strategy_accepts_above_its_bar(token, path, expected):
    """At a position with probabilities 0.6, 0.35, 0.05 and none: the second token passes, the third does not."""
    draft = Tree(np.array([token], np.int32), np.array([-1], np.int32), np.zeros(1, np.float32))
    params = SamplingParams(strategy="plausible")
    rows = torch.tensor([[0.6, 0.35, 0.05, 1e-9], [1e-9, 1e-9, 1e-9, 1.0]]).log()
    (judgement,) = judge([SessionStep(1, 0, np.array([0], np.int32), params, draft)], rows)
    assert (judgement.path, judgement.token_ids.tolist()) == (path, expected)
    assert not strategy("plausible").is_lossless(params)


@pytest.mark.usefixtures("extras")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(st.lists(steps(params=sampling_params("plausible")), max_size=3), st.integers(0, 2**32))
def test_the_strategy_judges_as_a_naive_version_does(batch, entropy):
    def bar_of(row, params):
        return oracle.distribution(row, replace(params, temperature=1.0)), 0.3

    logits = packed_logits(batch, entropy)
    expected = [oracle.longest(step, rows, bar_of) for step, rows in split(batch, logits)]
    assert [(j.path, j.token_ids.tolist()) for j in judge(batch, logits)] == [(p, list(t)) for p, t in expected]


def test_the_proposer_drafts_what_followed_last_time(proposer):
    """Also below its own nodes, and by what was committed since."""
    proposer.open(1, np.array([7, 8, 9, 7], np.int32), SamplingParams())
    assert _chain(proposer, 3) == [8, 9, 7]
    proposer.commit(1, np.array([8, 5, 7, 8], np.int32), [0])
    assert _chain(proposer, 3) == [5, 7, 8]
    proposer.commit(1, np.array([1], np.int32), [])
    assert _chain(proposer, 3) == []


def _chain(proposer, length: int) -> list[int]:
    tokens: list[int] = []
    for depth in range(length):
        (children,) = proposer.expand([Expansion(1, depth - 1, (depth,))])
        tokens += children.token_ids.tolist()
        if len(tokens) <= depth:
            break
    return tokens


@pytest.mark.parametrize("name", ["deterministic", "probabilistic", "plausible"])
def test_the_engine_serves_a_session(engine, name):
    """A verifier opens it, checks a draft with one wrong node, goes on without, and ends it at its length."""
    verifier = Verifier(engine, StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    open_session(verifier, tokens_left=5, strategy=name, temperature=0.8)
    verifier.handle(chain([15, 31, 50]), 0.0)
    (first,) = step(verifier)
    assert (first.token_ids.tolist(), first.mask.tolist()) == ([15, 31, 63], [1, 1, 0])
    assert engine.info.kv_slots - engine.free_slots == len(PROMPT) + 2
    (second,), (third,) = step(verifier), step(verifier)
    assert [*second.token_ids, *third.token_ids] == [26, 53]
    assert (second.finish, third.finish, verifier.has_work) == ("", "length", False)


# --- the rest of the page ---------------------------------------------------------------------------------------------


def test_the_files_it_names_exist():
    names = re.findall(r"`((?:specq|workers|tests|docs)/[\w./]*|\w+\.(?:md|toml))`", PAGE)
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_commands_it_names_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:`|^    )make ([\w-]+)", PAGE, re.MULTILINE)) <= set(targets)


def test_every_package_has_its_line():
    packages = {f"specq/{path.parent.name}/" for path in (ROOT / "specq").glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(specq/\w+/)` \|", PAGE, re.MULTILINE))

"""CONTRIBUTING.md is true: its examples, installed as a package of their own, do what every strategy, proposer, engine
and journal must do; the files and commands that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from specq.drafting import DRAFTERS, Expansion
from specq.engines import ENGINES
from specq.protocol import SamplingParams, SessionStep, Tree
from specq.verification import strategy
from specq.verification.judge import judge
from specq.verifier import StepCurve, Verifier
from tests.plugins.conftest import install, site  # noqa: F401
from tests.verifier.verifiers import PROMPT, chain, open_session, step

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = ("bigram", "doubling", "memory_journal", "plausible", "repeat")
(TOML,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def extras(site, monkeypatch):  # noqa: F811 - the fixture imported above
    """The page's examples, installed as the package `extras`."""
    for path, code in BLOCKS.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(code, "utf-8")
        monkeypatch.delitem(sys.modules, _module(path), raising=False)
    install(site, "extras", tomllib.loads(TOML)["project"]["entry-points"])
    return site


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@pytest.fixture
def proposer(extras):
    return DRAFTERS.resolve("bigram").make()


@pytest.fixture
def engine(extras):
    return ENGINES.resolve("doubling").make("", kv_slots=512)


# --- the examples -----------------------------------------------------------------------------------------------------


def test_every_block_is_an_example_that_runs():
    assert sorted(BLOCKS) == sorted(f"extras/{kind}{name}.py" for name in EXAMPLES for kind in ("", "test_"))
    assert PAGE.count("```python") == len(BLOCKS)


@pytest.mark.slow
def test_the_tests_of_the_examples_pass(extras):
    """In a process of their own, as they run where specq is only installed."""
    command = (sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "extras")
    environment = os.environ | {"PYTHONPATH": f"{extras}:{ROOT}"}
    ran = subprocess.run(command, cwd=extras, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = set(re.findall(r"^(extras/\w+\.py)::.* PASSED", ran.stdout, re.MULTILINE))
    assert passed == {f"extras/test_{name}.py" for name in EXAMPLES}


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

"""Strategies, drafters and engines of other packages: found by entry points, never instead of our own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from specq import Client, drafting, proposers
from specq.config import load, own_options, read_own
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.protocol import ConfigError
from specq.verification import STRATEGIES, reason_against, strategy
from specq.verification.strategies.deterministic import Deterministic
from tests.plugins.conftest import TABLES, install

PROMPT = "Count on, and on, and on."
# specq where torch cannot be imported, as on a machine without it
WITHOUT_TORCH = (sys.executable, "-c", "import sys; sys.modules['torch'] = None; from specq.cli import main; main()")


@pytest.mark.usefixtures("plugin")
def test_names_of_other_packages_can_be_resolved():
    assert ENGINES.resolve("counting").make.__name__ == "CountingEngine"
    assert DRAFTERS.resolve("counting").make.__name__ == "CountingDrafter"
    assert type(strategy("cautious")).__name__ == "Cautious"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_an_unknown_name_lists_all_known(table):
    with pytest.raises(ConfigError, match=f"unknown {table.kind} 'nobody'") as caught:
        table.resolve("nobody")
    known = str(caught.value).partition("known: ")[2].split(", ")
    assert sorted([*table, "cautious" if table is STRATEGIES else "counting"]) == known == sorted(table.names())


@pytest.mark.usefixtures("plugin")
def test_an_engine_of_another_package_has_a_section_of_its_own(tmp_path):
    path = tmp_path / "deployment.toml"
    path.write_text("[target]\nengine = 'counting'\n[target.counting]\nstride = 7\n", "utf-8")
    spec = ENGINES.resolve("counting")
    assert own_options(load(path).target, spec.options, ENGINES.names()).arguments() == {"stride": 7}
    with pytest.raises(ConfigError, match=r"--stride is 0, but must be from 1 to 100"):
        read_own(spec.options, {"stride": 0})


def test_our_own_names_are_not_replaced(site):
    groups = {"specq.strategies": {"deterministic": "example_plugin.cautious:Cautious"}}
    install(site, "usurper", groups)
    with capture_logs() as logs:
        assert STRATEGIES.names() == [*STRATEGIES]
    assert type(strategy("deterministic")) is Deterministic
    assert [(entry["event"], entry["name"]) for entry in logs] == [("entry_point_ignored", "deterministic")]


def test_drafters_are_also_found_under_the_former_name_of_their_group(site):
    """One that a package registers under both names is one."""
    counting = {"counting": "example_plugin.counting_drafter:COUNTING"}
    install(site, "older", {"specq.proposers": counting | {"older": counting["counting"]}})
    install(site, "newer", {"specq.drafters": counting})
    with capture_logs() as logs:
        assert DRAFTERS.names() == [*DRAFTERS, "counting", "older"]
    assert DRAFTERS.resolve("older") is DRAFTERS.resolve("counting")
    assert logs == []


def test_another_object_of_the_same_name_is_not_taken(site):
    for group, spec in (("specq.drafters", "COUNTING"), ("specq.proposers", "OTHER")):
        install(site, group.removeprefix("specq."), {group: {"counting": f"example_plugin.counting_drafter:{spec}"}})
    with capture_logs() as logs:
        assert DRAFTERS.names() == [*DRAFTERS, "counting"]
    assert [(entry["event"], entry["group"]) for entry in logs] == [("entry_point_ignored", "specq.proposers")]
    assert DRAFTERS.resolve("counting").make.__name__ == "CountingDrafter"


def test_the_former_name_of_the_package_gives_the_same_objects():
    assert all(getattr(proposers, name) is getattr(drafting, name) for name in drafting.__all__)
    moved = [
        "Chains",
        "ChainSource",
        "Followed",
        "HeadSource",
        "NO_TOKEN",
        "SUFFIX_DEPTH",
        "TreeHead",
        "make_suffix_tree",
    ]
    assert all(hasattr(proposers, name) for name in moved)


def test_a_plugin_that_fails_to_load_is_reported_and_isolated(site):
    """A broker asks for a strategy's traits at a client's word: that must not end it."""
    install(site, "broken", {"specq.strategies": {"broken": "no_such_package:Strategy"}})
    assert "the strategy 'broken' (no_such_package:Strategy) cannot be loaded: ModuleNotFoundError" in reason_against(
        "broken"
    )


@pytest.mark.usefixtures("plugin")
def test_a_pipeline_of_other_packages_runs_without_torch(
    spawn: Callable[..., subprocess.Popen[bytes]], free_address: str
) -> None:
    """A verifier imports torch only for an engine that needs it; the broker and drafters know the strategy too."""
    common = ("--broker", free_address, "--log-level", "error")
    spawn("broker", "--bind", free_address, "--journal", "none", "--log-level", "error", program=WITHOUT_TORCH)
    own = ("--model", "tiny", "--engine", "counting", "--engine-option", "stride=3")
    spawn("worker", "--role", "target", *own, *common, program=WITHOUT_TORCH)
    spawn("worker", "--role", "draft", "--model", "tiny", "--proposer", "counting", *common, program=WITHOUT_TORCH)
    with Client(free_address, timeout_s=60) as client:
        client.wait_until_ready(num_drafters=1)
        tokens = {name: client.generate(PROMPT, max_tokens=40, strategy=name) for name in ("cautious", "deterministic")}
    ids = tokens["cautious"].token_ids
    assert ids == tokens["deterministic"].token_ids == list(range(ids[0], ids[0] + 3 * 40, 3))

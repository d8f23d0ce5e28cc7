"""All that is missing or wrong is said before anything starts, and in order."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import Config, DraftConfig, TargetConfig, UpConfig
from specq.processes.deployment import Hardware, check_can_start, missing, placed
from specq.protocol import ConfigError
from specq.runtime import how_to_install
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle

LAPTOP = Hardware((0, 1))
TINY_WITH_VLLM = Config(
    target=TargetConfig(model="tiny", engine="vllm"), draft=DraftConfig(model="tiny"), up=UpConfig(drafters=1)
)


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The packages that are there."""
    names = {"torch", "vllm"}
    monkeypatch.setattr("specq.processes.deployment.find_spec", lambda name: name if name in names else None)
    return names


@pytest.fixture
def gguf(tmp_path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def faults(gguf: Path, installed: set[str]):
    """Each fault: what makes it, and how what is said of it begins; in the order in which a user acts on them."""

    def target(**changes):
        return lambda config: replace(config, target=replace(config.target, **changes))

    def draft(**changes):
        return lambda config: replace(config, draft=replace(config.draft, **changes))

    def without_vllm(config):
        installed.discard("vllm")
        return config

    return [
        (draft(model="/none"), "there is no model directory /none"),
        (target(model=str(gguf)), f"{gguf} is a GGUF file, which the vllm engine does not support"),
        (target(heads="smollm2"), "the vllm engine does not run Medusa heads"),
        (target(lookahead=True), "the vllm engine does not support lookahead"),
        (target(engine_options=("max_num_seqs=4",)), "engine option max_num_seqs is given by --max-sessions"),
        (draft(engine_options=("depth=1",)), "draft-model has no option depth"),
        (without_vllm, "this needs vllm, which is not installed"),
    ]


def test_all_that_is_missing_is_said_in_the_order_in_which_a_user_acts(gguf, installed):
    """Any of the faults together: what each says by itself, no more, no less, and in their order."""
    every = range(len(faults(gguf, installed)))
    for count in (0, 1, 2, 3, len(every)):
        for chosen in combinations(every, count):
            installed.add("vllm")
            config, expected = TINY_WITH_VLLM, []
            for number in chosen:
                make, said = faults(gguf, installed)[number]
                config = make(config)
                expected.append(said)
            found = missing(placed(config, LAPTOP))
            assert [one[: len(said)] for one, said in zip(found, expected, strict=True)] == expected
            if not found:
                check_can_start(config, LAPTOP)
                continue
            with pytest.raises(ConfigError) as error:
                check_can_start(config, LAPTOP)
            lines = str(error.value).splitlines()
            shown = [line[len("  1. ") :] for line in lines[1:]] if len(found) > 1 else lines
            assert shown == found


def test_the_same_model_and_options_start_with_the_torch_engine(gguf, installed):
    installed.discard("vllm")
    target = TargetConfig(model=str(gguf), lookahead=True, heads="smollm2")
    assert missing(placed(replace(TINY_WITH_VLLM, target=target), LAPTOP)) == []


def test_heads_that_the_engine_cannot_run_so_are_named(gguf, installed, tmp_path):
    """vLLM's drafters draft chains. A head for another target is found before anything starts. A head inside the
    checkpoint needs no directory."""
    head = make_eagle(tmp_path / "head", eagle_shape_of(32, 4096, 23))
    target = TargetConfig(model="tiny", engine="vllm", heads=str(head), heads_tree="[[0]]")
    trees, other = missing(placed(replace(TINY_WITH_VLLM, target=target), LAPTOP))
    assert trees.startswith("the vllm engine drafts no trees with heads, only chains")
    assert "takes hidden states of size 32; those of tiny have 256" in other
    block = make_block(tmp_path / "block", block_shape_of(256, 4096, (1, 5)))
    target = TargetConfig(model="tiny", engine="vllm", heads=str(block))
    (said,) = missing(placed(replace(TINY_WITH_VLLM, target=target), LAPTOP))
    assert "a block drafter in specq's own form, which vLLM does not read" in said
    target = TargetConfig(model="tiny", engine="vllm", heads="mtp")
    assert missing(placed(replace(TINY_WITH_VLLM, target=target), LAPTOP)) == []
    (said,) = missing(placed(replace(TINY_WITH_VLLM, target=replace(target, engine="torch")), LAPTOP))
    assert said.startswith("tiny is no directory with an MTP layer that specq computes")


def test_a_draft_model_that_its_proposer_does_not_take_is_named(gguf, installed):
    config = replace(TINY_WITH_VLLM, draft=DraftConfig(model=str(gguf), proposer="vllm"))
    (said,) = missing(placed(config, LAPTOP))
    assert said.startswith(f"{gguf} is a GGUF file, which the vllm proposer does not support")
    assert missing(placed(replace(config, up=UpConfig(drafters=0)), LAPTOP)) == []


def test_a_model_with_a_name_is_called_by_it(gguf, installed, monkeypatch):
    """The default one is a GGUF file."""
    monkeypatch.setattr("specq.models.find_packaged", lambda name: (gguf, "fetched"))
    config = Config(target=TargetConfig(engine="vllm"))
    (said,) = missing(placed(config, LAPTOP))
    assert said.startswith(f"smollm2 ({gguf}) is a GGUF file")


def test_a_package_of_another_engine_is_named_without_an_extra():
    assert how_to_install("doubling") == "this needs doubling, which is not installed"


@pytest.mark.parametrize("command", ["up", "chat"])
def test_commands_report_all_missing_parts_and_start_no_process(command, gguf, installed, monkeypatch, free_address):
    """The broker included."""
    installed.discard("vllm")
    monkeypatch.setattr("specq.processes.up.subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr("specq.cli.chat._served_models", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    (gguf.parent / "own.toml").write_text(
        f"[broker]\nbind = '{free_address}'\n[target]\nengine = 'vllm'\n[target.vllm]\nscheduler_cls = 'x'\n"
    )
    further = ("hi",) if command == "chat" else ()
    done = CliRunner().invoke(
        main, [command, "--config", str(gguf.parent / "own.toml"), "--model", str(gguf), *further]
    )
    assert done.exit_code == 2
    first, *others = done.stderr.splitlines()
    assert first == "specq: 3 things are missing or wrong:"
    assert [line[:5] for line in others] == ["  1. ", "  2. ", "  3. "]
    assert ["GGUF file" in others[0], "scheduler_cls" in others[1], "needs vllm" in others[2]] == [True] * 3

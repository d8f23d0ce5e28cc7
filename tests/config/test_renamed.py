"""Old names of keys, which are aliases for one version."""

from __future__ import annotations

import pytest

from specq.cli.services import up, worker
from specq.config.loading import RENAMED, load, options_of, override, to_arguments, with_own
from specq.config.options import kinds
from specq.config.sections import SECTIONS, Config, DraftConfig, TargetConfig
from specq.engines import ENGINES
from specq.protocol.errors import ConfigError
from tests.each import each


def keys_of(section: str) -> set[str]:
    """The keys of a section, or of one of an engine."""
    name, _, engine = section.partition(".")
    return set(kinds(ENGINES.resolve(engine).options if engine else SECTIONS[name]))


def test_old_names_stand_for_keys_that_there_are():
    for section, names in RENAMED.items():
        assert set(names.values()) <= keys_of(section)
        assert not set(names) & keys_of(section)


@each(
    ("text", "expected"),
    [
        ("[target]\nbackup = 'none'", Config(target=TargetConfig(prompt_lookup="none"))),
        ("[draft]\nlaw_size = 7", Config(draft=DraftConfig(distribution_size=7))),
    ],
)
def test_a_file_may_have_the_old_name_of_a_key(write, monkeypatch, text, expected):
    """It works as the new one does, also in a file that the environment names, and says what to write instead."""
    path = write(text)
    moved = r"(backup is now target\.prompt_lookup|law_size is now draft\.distribution)"
    with pytest.warns(FutureWarning, match=moved):
        assert load(path) == expected
    monkeypatch.setenv("SPECQ_CONFIG", str(path))
    with pytest.warns(FutureWarning, match="the next version does not accept the old name"):
        assert load() == expected


def test_the_old_name_together_with_the_new_one_is_refused(write):
    with pytest.raises(ConfigError, match=r"target\.backup and target\.prompt_lookup are both given"):
        load(write("[target]\nbackup = 'none'\nprompt_lookup = 'none'"))
    with pytest.raises(ConfigError, match="remove backup, the old name of prompt_lookup"):
        override(TargetConfig(), backup="none", prompt_lookup="none")


def test_the_command_line_may_have_the_old_name_of_a_key(write):
    """The options are there but not shown, win over a file's new name, and belong to the role whose key it was."""
    arguments = ["--role", "target", "--backup", "none", "--law-size", "9"]
    context = worker.make_context("worker", arguments, resilient_parsing=True)
    assert (context.params["backup"], context.params["law_size"]) == ("none", 9)
    assert "--backup" not in worker.get_help(context)
    section = load(write("[target]\nprompt_lookup = 'suffix'")).target
    with pytest.warns(FutureWarning, match="target.backup is now target.prompt_lookup"):
        assert override(section, backup="none") == TargetConfig(prompt_lookup="none")
    with pytest.raises(ConfigError, match="unknown option of target law_size"):
        override(section, law_size=9)
    with (
        pytest.warns(FutureWarning, match="draft.law_size"),
        pytest.raises(ConfigError, match="distribution_size is 0"),
    ):
        override(DraftConfig(), law_size=0)


# --- keys of one engine ----------------------------------------------------------------------------------------------

NOW = {"tensor_parallel_size": 2}


@each(
    "given",
    [
        "[target]\nengine = 'vllm'\n[target.vllm]\ntensor_parallel = 2",
        {"engine": "vllm", "engine_options": ("tensor_parallel=2",)},
        {"engine": "vllm", "tensor_parallel": 2},
    ],
)
def test_a_key_of_an_engine_may_have_its_old_name_wherever_it_may_stand(write, given):
    """In a file, as an engine option, and as an option of its own; processes that are started get the new name."""
    in_file = isinstance(given, str)
    target = load(write(given)).target if in_file else override(TargetConfig(), **with_own(given, ("tensor_parallel",)))
    moved = r"target\.vllm\.tensor_parallel is now target\.vllm\.tensor_parallel_size"
    with pytest.warns(FutureWarning, match=moved):
        assert options_of(target) == NOW
    with pytest.warns(FutureWarning, match=moved):
        assert "tensor_parallel_size=2" in to_arguments(target)


def test_the_command_line_wins_over_a_file_whichever_name_each_has(write):
    path = write("[target]\nengine = 'vllm'\n[target.vllm]\ntensor_parallel = 4")
    target = override(load(path).target, engine_options=("tensor_parallel_size=2",))
    with pytest.warns(FutureWarning, match="is now"):
        assert options_of(target) == NOW
    both = override(target, engine_options=("tensor_parallel_size=2", "tensor_parallel=2"))
    with (
        pytest.warns(FutureWarning, match="is now"),
        pytest.raises(ConfigError, match="both given; remove tensor_parallel, the old name of tensor_parallel_size"),
    ):
        options_of(both)


@each(("command", "further"), [(worker, ("--role", "target")), (up, ())])
def test_commands_have_one_flag_for_it_and_take_the_old_one(command, further):
    for flag, name in (("--tensor-parallel-size", "tensor_parallel_size"), ("--tensor-parallel", "tensor_parallel")):
        context = command.make_context(command.name, [*further, flag, "2"], resilient_parsing=True)
        assert context.params[name] == 2
    assert "--tensor-parallel " not in command.get_help(context)

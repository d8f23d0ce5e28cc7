"""Old names of keys, which are aliases for one version."""

from __future__ import annotations

import pytest

from specq.cli.worker import worker
from specq.config.loading import load, override
from specq.config.renamed import RENAMED
from specq.config.sections import SECTIONS, Config, DraftConfig, TargetConfig, kinds
from specq.protocol.errors import ConfigError


def test_old_names_stand_for_keys_that_there_are():
    for section, names in RENAMED.items():
        assert set(names.values()) <= set(kinds(SECTIONS[section]))
        assert not set(names) & set(kinds(SECTIONS[section]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[target]\nbackup = 'none'", Config(target=TargetConfig(prompt_lookup="none"))),
        ("[draft]\nlaw_size = 7", Config(draft=DraftConfig(distribution_size=7))),
    ],
)
def test_a_file_may_have_the_old_name_of_a_key(write, monkeypatch, text, expected):
    """It works as the new one does, also in a file that the environment names, and says what to write instead."""
    path = write(text)
    with pytest.warns(
        FutureWarning, match=r"(backup is now target\.prompt_lookup|law_size is now draft\.distribution)"
    ):
        assert load(path) == expected
    monkeypatch.setenv("SPECQ_CONFIG", str(path))
    with pytest.warns(FutureWarning, match="the next version does not know the old name"):
        assert load() == expected


def test_the_old_name_together_with_the_new_one_is_refused(write):
    with pytest.raises(ConfigError, match=r"target\.backup and target\.prompt_lookup are both given"):
        load(write("[target]\nbackup = 'none'\nprompt_lookup = 'none'"))
    with pytest.raises(ConfigError, match="backup is the old name of prompt_lookup"):
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

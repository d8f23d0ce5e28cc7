"""What a model's name means, and the pair that ships with specq."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq import models
from specq.doctor import pair
from specq.doctor.checks import OK
from specq.models import HEADS, known_models, resolve_model
from specq.models.packaged import find_packaged
from specq.protocol.errors import ConfigError
from tests.each import each


def test_resolve_model_takes_directories_of_models(tmp_path):
    with pytest.raises(ConfigError, match=r"neither a config\.json nor a GGUF file"):
        resolve_model(str(tmp_path), "target")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), "target") == str(tmp_path)


@each("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "", "no such name"])
def test_resolve_model_refuses_an_invalid_model(name):
    with pytest.raises(ConfigError, match="no model"):
        resolve_model(name, "target")


def test_bundled_pair():
    """The package carries a target and a draft, whose licence and size are known, under the name `tiny`."""
    models = {model.role: model for model in known_models() if model.name == "tiny"}

    assert set(models) == {"target", "draft"}
    assert all(model.licence != "unknown" for model in models.values())
    assert models["target"].num_bytes > models["draft"].num_bytes > 0
    assert resolve_model("tiny", "draft") == str(models["draft"].path)


def test_bundled_heads_are_known_by_the_name_of_their_target():
    """And fit it, where its weights are on this machine."""
    place = resolve_model("smollm2", HEADS)
    (heads,) = [model for model in known_models() if model.role == HEADS]

    assert (heads.name, heads.licence, heads.source) == ("smollm2", "Apache-2.0", "bundled, unpacked")
    assert place == str(heads.path)
    if find_packaged("smollm2"):
        checks = pair.look("smollm2", "", 10**11, heads="smollm2").checks
        (check,) = [check for check in checks if check.name == "heads"]
        assert check.status == OK, check
        assert check.found.startswith("4 Medusa heads")


@each("name", ["nowhere", "tiny", "./nowhere", "a/b"])
def test_missing_heads_are_named_with_the_available_ones(name):
    with pytest.raises(ConfigError, match=f"no directory of heads {Path(name)};.*named heads exist for: smollm2"):
        resolve_model(name, HEADS)


@each(
    ("said", "reason"),
    [
        (None, "no config.json"),
        ("{}", "medusa_num_heads"),
        ('{"draft_vocab_size": 0}', "EAGLE-3"),
        ("[", "not valid JSON"),
    ],
)
def test_a_directory_of_something_else_holds_no_heads(tmp_path, said, reason):
    if said is not None:
        (tmp_path / "config.json").write_text(said)

    with pytest.raises(ConfigError, match=reason):
        resolve_model(str(tmp_path), HEADS)


def test_a_parallel_draft_model_of_a_pair_has_a_name_of_its_own(tmp_path, monkeypatch):
    for role in ("target", "draft", "parallel"):
        (tmp_path / "small" / role).mkdir(parents=True)
        (tmp_path / "small" / role / "config.json").write_text("{}")
    monkeypatch.setattr(models, "_HOME", tmp_path)

    assert resolve_model("small-parallel", "draft") == str(tmp_path / "small" / "parallel")
    assert models.tokenizer_of("small-parallel", "draft") == str(tmp_path / "small" / "target")
    assert models.draft_for("small") == "small"
    assert [(model.name, model.role) for model in known_models()] == [
        *(("small", "target"), ("small", "draft"), ("small-parallel", "draft"))
    ]


@each(("name", "meant"), [("smolm2", "smollm2"), ("tinny", "tiny"), ("smollm2-paralel", "smollm2-parallel")])
def test_a_name_that_is_like_one_of_ours_is_taken_for_a_slip(name, meant):
    with pytest.raises(ConfigError, match=f"there is no model '{name}'; did you mean '{meant}'"):
        resolve_model(name, "target")


@each("name", ["gpt2", "someone/smolm2", "distilgpt2", "Qwen/Qwen2.5-0.5B"])
def test_other_names_are_the_hubs(name):
    assert resolve_model(name, "target") == name

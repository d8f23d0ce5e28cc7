"""Configuration: files, environment and command line become checked sections, and whatever is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq.cli.worker import worker
from specq.config.addresses import check_connect, connect_address, is_local
from specq.config.arguments import to_arguments
from specq.config.loading import cache_dir, environment_of_children, load, override
from specq.config.own_options import options_of, own_options, read_own, with_own
from specq.config.renamed import RENAMED
from specq.config.sections import SECTIONS, BrokerConfig, ClientConfig, Config, DraftConfig, TargetConfig, kinds
from specq.engines import ENGINES
from specq.engines.torch_spec import TorchOptions
from specq.engines.vllm.spec import VllmOptions
from specq.models import bundled, resolve_model
from specq.protocol.errors import ConfigError

ALL = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.toml"))
CONFIGS = [path for path in ALL if not path.name.startswith("simulate")]  # those are read by tests/simulate


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "deployment.toml"
        path.write_text(text)
        return path

    return write


def test_defaults():
    """Without a file every option has a default, and they are the documented ones."""
    config = load()

    assert Config() == config
    assert config.broker.bind == config.target.broker == config.draft.broker == "tcp://127.0.0.1:5750"
    assert (config.up.targets, config.up.drafters) == (1, 2)


def test_file_sets_what_it_names(write):
    """What a file does not name keeps its default; whole numbers do for fractions, lists become tuples."""
    config = load(write("[client]\ntimeout_s = 3\n[target]\ncores = [0, 1]\nverbose = true\n"))

    assert ClientConfig(timeout_s=3) == config.client
    assert TargetConfig(cores=(0, 1), verbose=True) == config.target
    assert BrokerConfig() == config.broker


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[broker]\nbindd = 'x'", ["broker.bindd", "bind, heartbeat_ms, liveness_ms"]),
        ("[brokr]\n", ["unknown section brokr", "broker, target, draft, up, client"]),
        ("broker = 3", ["broker is 3", "[broker]"]),
        ("[broker]\nheartbeat_ms = '5'", ["broker.heartbeat_ms is '5'", "a whole number"]),
        ("[broker]\nheartbeat_ms = true", ["broker.heartbeat_ms is True", "a whole number"]),
        ("[broker]\nheartbeat_ms = 0", ["broker.heartbeat_ms is 0", "from 10 to 60000"]),
        ("[broker]\nheartbeat_ms = 500\nliveness_ms = 600", ["broker.liveness_ms is 600", "twice heartbeat_ms"]),
        ("[broker]\ninsecure = 1", ["broker.insecure is 1", "true or false"]),
        ("[client]\ntimeout_s = nan", ["client.timeout_s is nan", "from 0.001"]),
        ("[target]\ndtype = 'fp8'", ["target.dtype is 'fp8'", "auto, float32, bfloat16, float16"]),
        ("[target]\ncores = ['0']", ["target.cores is ['0']", "a list of CPU ids"]),
        ("[draft]\ncores = [-1]", ["draft.cores is (-1,)", "from 0"]),
        ("[draft]\nmodel = 3", ["draft.model is 3", "a string"]),
        ("[broker", ["is not valid TOML"]),
    ],
)
def test_mistakes_are_named(write, text, said):
    """A mistake in a file names the file, the key, and what would be right."""
    path = write(text)

    with pytest.raises(ConfigError) as raised:
        load(path)

    assert all(part in str(raised.value) for part in [str(path), *said]), raised.value


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load("nowhere.toml")


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5750", "tcp://*:5750", "tcp://10.1.2.3:5750", "tcp://[::]:5750"])
def test_binds_beyond_this_machine_are_refused(bind):
    """Nothing listens beyond loopback unless it was asked for."""
    with pytest.raises(ConfigError, match="insecure"):
        BrokerConfig(bind=bind)

    with pytest.raises(ConfigError, match=r"docs/security\.md"):
        TargetConfig(bind=bind, advertise="tcp://gpu:5751")

    assert BrokerConfig(bind=bind, insecure=True).bind == bind
    assert BrokerConfig(bind=bind, keys="keys").bind == bind
    assert TargetConfig(bind=bind, keys="keys", advertise="tcp://gpu:5751").bind == bind


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x"]
)
def test_binds_of_this_machine_are_fine(bind):
    assert is_local(bind)
    assert BrokerConfig(bind=bind).bind == bind


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5750", "tcp://127.0.0.1", "tcp://h:99999", "tcp://h:0", "udp://h:1", "ipc://", ""]
)
def test_malformed_addresses(address):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT or ipc://PATH"):
        ClientConfig(broker=address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://*:5750", "tcp://0.0.0.0:5750"])
def test_addresses_that_cannot_be_connected_to(address):
    with pytest.raises(ConfigError, match="must name a host and a port"):
        check_connect("client.broker", address)


def test_a_wildcard_needs_an_address_to_advertise():
    with pytest.raises(ConfigError, match="set advertise"):
        TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True)

    assert TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True, advertise="tcp://gpu.lan:5751").insecure


def test_connect_address_of_a_wildcard_is_loopback():
    assert connect_address("tcp://*:5750") == connect_address("tcp://0.0.0.0:5750") == "tcp://127.0.0.1:5750"
    assert connect_address("tcp://[::]:5750") == "tcp://[::1]:5750"
    assert connect_address("ipc:///tmp/x") == "ipc:///tmp/x"


def test_override_takes_what_was_given():
    """None means not given; what is given is checked like what a file says."""
    assert DraftConfig(width=4) == override(DraftConfig(), width=4, name=None)
    with pytest.raises(ConfigError, match=r"draft\.width is 0"):
        override(DraftConfig(), width=0)
    with pytest.raises(ConfigError, match=r"unknown option of draft engine; known are broker, model"):
        override(DraftConfig(), engine="torch")


def test_environment(write, monkeypatch, tmp_path):
    """SPECQ_CONFIG names the file, SPECQ_BROKER wins over it; neither reaches the children of `specq up`."""
    path = write("[draft]\nwidth = 5\nbroker = 'tcp://127.0.0.1:1'\n")
    monkeypatch.setenv("SPECQ_CONFIG", str(path))
    monkeypatch.setenv("SPECQ_BROKER", "tcp://127.0.0.1:2")
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path))

    config = load()

    assert config.draft.width == 5
    assert config.draft.broker == config.target.broker == config.client.broker == "tcp://127.0.0.1:2"
    assert config.broker.bind == "tcp://127.0.0.1:5750"
    assert cache_dir() == tmp_path
    assert not {"SPECQ_CONFIG", "SPECQ_BROKER"} & set(environment_of_children())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_load(path):
    assert load(path) != Config() or path.name == "laptop.toml"


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
    assert own_options(torch, TorchOptions, ENGINES).arguments() == {"helper_cores": (3,)}
    for config in (target, torch):
        given = worker_options("--role", "target", *to_arguments(config))["engine_options"]
        assert options_of(TargetConfig(engine=config.engine, engine_options=given)) == options_of(config)


def test_the_command_line_wins_over_an_engines_section(write):
    target = load(write("[target]\nengine = 'vllm'\n[target.vllm]\nmax_model_len = 512\nseed = 3\n")).target
    given = {"max_model_len": 64, "quantization": "fp8", "engine_options": ("seed=4",), "helper_cores": None}
    target = override(target, **with_own(given, ("max_model_len", "quantization", "helper_cores")))

    assert options_of(target) == {"max_model_len": 64, "seed": 4, "quantization": "fp8"}
    assert options_of(TargetConfig(engine_options=("a=1", "b=x=y", 'c="1"'))) == {"a": 1, "b": "x=y", "c": "1"}


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("[target]\nengine = 'vllm'\nmax_model_len = 512", "target.max_model_len is now target.vllm.max_model_len"),
        ("[target]\nhelper_cores = [3]", "target.helper_cores is now target.torch.helper_cores"),
        ("[target.engine_options]\nseed = 3", "the section target.engine_options is now target.torch"),
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("seed",), "engine option 'seed' is not of the form name=value"),
        (("=3",), "engine option '=3' is not of the form"),
        (("a=1", "a=2"), "engine option a is given twice"),
        ((3,), r"target.engine_options is \[3\]; it must be a table of options"),
        (("seed=3",), "torch has no option seed; known are helper_cores"),
        (('helper_cores="x"',), "torch.helper_cores is 'x'; it must be a list of CPU ids"),
    ],
)
def test_wrong_options_of_an_engine_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        own_options(TargetConfig(engine_options=options), TorchOptions, ENGINES)


def test_a_section_of_no_engine_is_named(write):
    """Only the worker knows which engines there are."""
    target = load(write("[target.vlm]\nmax_model_len = 5\n")).target
    with pytest.raises(ConfigError, match=r"unknown key target\.vlm; sections are known for torch, vllm"):
        own_options(target, TorchOptions, ENGINES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_model_len": "x"}, "vllm.max_model_len is 'x'; it must be a whole number"),
        ({"gpu_memory_utilization": 1.5}, "vllm.gpu_memory_utilization is 1.5; it must be from 0 to 1.0"),
    ],
)
def test_values_of_an_engines_options_are_checked(values, said):
    with pytest.raises(ConfigError, match=said):
        read_own(VllmOptions, values)


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
    models = {model.role: model for model in bundled() if model.name == "tiny"}

    assert set(models) == {"target", "draft"}
    assert all(model.licence != "unknown" for model in models.values())
    assert models["target"].num_bytes > models["draft"].num_bytes > 0
    assert resolve_model("tiny", "draft") == str(models["draft"].path)


# --- renamed keys -------------------------------------------------------------------------------------------------


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
    section = load(write("[target]\nprompt_lookup = 'ngram'")).target
    with pytest.warns(FutureWarning, match="target.backup is now target.prompt_lookup"):
        assert override(section, backup="none") == TargetConfig(prompt_lookup="none")
    with pytest.raises(ConfigError, match="unknown option of target law_size"):
        override(section, law_size=9)
    with (
        pytest.warns(FutureWarning, match="draft.law_size"),
        pytest.raises(ConfigError, match="distribution_size is 0"),
    ):
        override(DraftConfig(), law_size=0)

"""Configuration: files, environment and command line become checked sections, and each error is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from specq.config.loading import cache_dir, environment_of_children, load, override
from specq.config.sections import AUTO_DRAFTERS, BrokerConfig, ClientConfig, Config, DraftConfig, TargetConfig
from specq.protocol.errors import ConfigError
from tests.each import each

ALL = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.toml"))
CONFIGS = [path for path in ALL if not path.name.startswith("simulate")]  # those are read by tests/simulate


def test_defaults():
    """Without a file every option has a default, and they are the documented ones."""
    config = load()

    assert Config() == config
    assert config.broker.bind == config.target.broker == config.draft.broker == "tcp://127.0.0.1:5750"
    assert (config.up.targets, config.up.drafters) == (1, AUTO_DRAFTERS)


def test_file_sets_what_it_names(write):
    """What a file does not name keeps its default; whole numbers do for fractions, lists become tuples."""
    config = load(write("[client]\ntimeout_s = 3\n[target]\ncores = [0, 1]\nverbose = true\n"))

    assert ClientConfig(timeout_s=3) == config.client
    assert TargetConfig(cores=(0, 1), verbose=True) == config.target
    assert BrokerConfig() == config.broker


@each(
    ("text", "said"),
    [
        (
            "[broker]\nbindd = 'x'",
            ["unknown key broker.bindd; did you mean 'bind'? known: bind, advertise, heartbeat_ms, live"],
        ),
        (
            "[brokr]\n",
            ["unknown section brokr; did you mean 'broker'? known: broker, target, draft, up, client, se"],
        ),
        ("model = 'tiny'", ["unknown section model; known: broker, "]),
        ("[target]\nmodle = 'tiny'", ["unknown key target.modle; did you mean 'model'? known: "]),
        ("[draft]\nengine = 'torch'", ["unknown key draft.engine; known: broker, "]),
        (
            "[target]\nbatch_invariant = true",
            ["unknown key target.batch_invariant; ", "options of one engine belong in its own table", "[target.auto]"],
        ),
        ("[draft]\nwindow = 5", ["unknown key draft.window; ", "of one proposer", "for example [draft.draft-model]"]),
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
        ("[target]\nheads_tree = '[[0]]'", ["target.heads_tree needs target.heads"]),
        ("[broker", ["is not valid TOML"]),
        ("x = " + "[" * 3000, ["is not a valid configuration", "nested too deeply"]),
        ("[target]\n" + "a." * 3000 + "a = 1", ["is not a valid configuration", "nested too deeply"]),
    ],
)
def test_mistakes_are_named(write, text, said):
    """A mistake in a file names the file, the key, and what would be right."""
    path = write(text)

    with pytest.raises(ConfigError) as raised:
        load(path)

    assert all(part in str(raised.value) for part in [str(path), *said]), raised.value


def test_override_takes_what_was_given():
    """None means not given; what is given is checked like what a file says."""
    assert DraftConfig(width=4) == override(DraftConfig(), width=4, name=None)
    with pytest.raises(ConfigError, match=r"draft\.width is 0"):
        override(DraftConfig(), width=0)
    with pytest.raises(ConfigError, match=r"unknown option of draft engine; known: broker, model"):
        override(DraftConfig(), engine="torch")


def test_missing_file():
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        load("nowhere.toml")


def test_a_wrong_broker_of_the_environment_is_named_by_its_variable(monkeypatch):
    """Not by a section of a file that has nothing of it."""
    monkeypatch.setenv("SPECQ_BROKER", "hub")
    with pytest.raises(ConfigError, match=r"^SPECQ_BROKER is 'hub'; expected tcp://HOST:PORT"):
        load()


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


@each("path", CONFIGS)
def test_shipped_files_load(path):
    assert load(path) != Config() or path.name == "laptop.toml"

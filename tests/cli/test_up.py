"""`specq up` and `specq chat` on the command line: what they start, and what is named before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from specq.cli import COMMANDS, main
from specq.config.sections import TargetConfig
from specq.processes.deployment import Hardware, placed
from specq.protocol.errors import EngineError
from specq.runtime.table import resolve
from tests.each import each


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def given(monkeypatch):
    """The configurations that `specq up` was to run. No process starts."""
    configs = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: configs.append(config) or 0)
    return configs


def test_up_takes_what_says_what_drafts_in_the_verifier(given):
    """The options are those of `specq worker --role target`, and what is given wins over the file."""
    options = ("--lookahead", "--lookahead-window", "7", "--shared-tokens", "1000", "--heads", "smollm2")
    assert run("up", "--model", "tiny", *options, "--prompt-lookup", "none", "--drafts", "always").exit_code == 0
    wanted = TargetConfig(
        model="tiny", lookahead=True, lookahead_window=7, shared_tokens=1000, heads="smollm2", prompt_lookup="none",
        drafts="always",
    )  # fmt: skip
    assert given[0].target == wanted


def test_up_takes_an_engine_and_its_options_as_a_worker_does(given):
    assert run("up", "--engine", "vllm", "--engine-option", "seed=0", "--engine-option", "x=1").exit_code == 0
    assert given[0].target == TargetConfig(engine="vllm", engine_options=("seed=0", "x=1"))


@pytest.fixture
def starts_nothing(monkeypatch):
    monkeypatch.setattr("specq.processes.up.Group.__enter__", lambda _: pytest.fail("processes were started"))


VLLM_CONFIG = str(Path(__file__).parents[2] / "configs" / "vllm.toml")


@each(
    "arguments",
    [
        ("up", "--config", VLLM_CONFIG),
        ("up", "--engine", "vllm", "--model", "tiny"),
        ("chat", "--config", VLLM_CONFIG, "--draft-model", "none", "hi"),
    ],
)
@pytest.mark.usefixtures("starts_nothing")
def test_a_package_that_an_engine_lacks_is_named_before_anything_is_started(monkeypatch, arguments, free_address):
    monkeypatch.setattr("specq.processes.deployment.find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    address = ("--broker", free_address) if arguments[0] == "up" else ()
    done = run(*arguments, *address)
    assert done.exit_code == 2
    assert done.stderr == (
        "specq: this needs vllm, which is not installed; in a clone of specq: "
        "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install -e '.[vllm]'\n"
    )


@pytest.mark.usefixtures("starts_nothing")
def test_an_engine_that_is_none_is_named_before_anything_is_started(free_address):
    done = run("up", "--engine", "vlm", "--model", "tiny", "--broker", free_address)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "vlm" in done.stderr


@each(("draft_model", "expected"), [("none", ""), ("", ""), ("tiny", "tiny")])
def test_no_draft_model_is_called_none(given, tmp_path, draft_model, expected):
    """On the command line; it wins over that of the file. An empty name is the former form."""
    (tmp_path / "own.toml").write_text('[target]\nmodel = "tiny"\ndraft_model = "tiny"\n')
    assert run("up", "--config", str(tmp_path / "own.toml"), "--draft-model", draft_model).exit_code == 0
    chosen = placed(given[-1], Hardware((0, 1)))
    assert (chosen.target.draft_model, chosen.up.drafters) == (expected, 0)


@pytest.fixture
def chats(monkeypatch):
    """The configurations of chats that would start processes; a broker that answers would be asked for its models."""
    given = []

    def servers(config, **_):
        given.append(config)
        raise EngineError("enough is known")

    monkeypatch.setattr("specq.processes.servers.Servers", servers)
    monkeypatch.setattr("specq.cli.chat._served_models", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return given


def test_no_draft_model_is_called_none_in_a_chat_with_its_own_processes(chats):
    for options in ((), ("--draft-model", "none")):
        assert "enough is known" in run("chat", "--model", "tiny", *options, "hi").stderr
    assert [placed(config, Hardware((0, 1))).target.draft_model for config in chats] == ["tiny", ""]


def test_a_chat_with_an_arithmetic_starts_processes_with_it(chats, monkeypatch):
    monkeypatch.setattr("specq.cli.chat._served_models", lambda _: ["tiny"])
    assert "enough is known" in run("chat", "--arithmetic", "exact", "hi").stderr
    assert chats[0].target.engine_options == ('arithmetic="exact"',)


def test_up_lets_pages_of_named_origins_ask(given):
    origins = ("https://a.example", "https://b.example:8443")
    assert run("up", "--serve", *(part for origin in origins for part in ("--cors-origin", origin))).exit_code == 0
    assert given[0].serve.cors_origins == origins


def test_up_says_where_http_is_served(given):
    """By the options of `specq serve`; what is given wins over the file, and nothing is given in vain."""
    tls = ("--tls-cert", "c.pem", "--tls-key", "k.pem", "--hosts", "llm.example.org", "--api-keys", "a.toml")
    assert run("up", "--serve", "--bind", "tcp://127.0.0.1:9000").exit_code == 0
    assert run("up", "--serve", "--bind", "tcp://*:9000", *tls).exit_code == 0
    assert [one.serve.bind for one in given] == ["tcp://127.0.0.1:9000", "tcp://*:9000"]
    served = given[1].serve
    assert (served.tls_cert, served.tls_key, served.hosts) == ("c.pem", "k.pem", "llm.example.org")

    in_the_open = run("up", "--serve", "--bind", "tcp://*:9000")
    assert "give --api-keys and --tls-cert" in in_the_open.stderr
    assert "`insecure = true` under [serve]" in in_the_open.stderr
    values = {"--bind": "tcp://127.0.0.1:9000", "--api-keys": "a.toml", "--cors-origin": "https://a.example"}
    for flag, value in values.items():
        in_vain = run("up", flag, value)
        assert in_vain.exit_code == 2
        assert f"{flag} is an option of the HTTP gateway; add --serve" in in_vain.stderr
    assert len(given) == 2


def test_an_option_of_up_says_what_it_says_of_a_gateway_or_a_verifier():
    """There is one definition of it: the key of its section."""
    up, serve, worker = (
        {one.opts[0]: one.help for one in resolve("command", COMMANDS, name).params}
        for name in ("up", "serve", "worker")
    )
    for option in ("--bind", "--tls-cert", "--tls-key", "--hosts", "--cors-origin"):
        assert up[option] == serve[option]
    drafting = ("--lookahead", "--lookahead-window", "--shared-tokens", "--heads", "--prompt-lookup", "--drafts")
    for option in (*drafting, "--engine"):
        assert up[option].partition("  [")[0] in worker[option].replace(" (--role target only)", "")

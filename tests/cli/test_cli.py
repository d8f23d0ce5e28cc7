"""The command line: quick to start, one clear line for each mistake, and its options are the configuration's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from specq import Client, __version__
from specq.cli import COMMANDS, SUMMARIES, exit_status, main
from specq.cli.bench import load as load_bench
from specq.cli.options import section_options
from specq.config.loading import override, to_arguments
from specq.config.sections import AUTO_DRAFTERS, BrokerConfig, ClientConfig, DraftConfig, TargetConfig, UpConfig
from specq.protocol.errors import ConfigError, EngineError, JobError
from specq.runtime.columns import columns
from specq.runtime.table import resolve
from tests.each import each

HEAVY = {"torch", "transformers", "vllm", "safetensors"}
CALL_HELP = "from specq.cli import main; main(['--help'], standalone_mode=False)"


def _imported(code: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has imported after `code`."""
    shown = "import sys; print('\\n' + ' '.join({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{shown}"], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def _run(*arguments: str):
    return CliRunner().invoke(main, arguments)


@each(
    "module", ["specq", "specq.cli", "specq.client", "specq.broker.core", "specq.processes.broker", "specq.text.codec"]
)
def test_broker_and_client_start_without_torch(module):
    assert not HEAVY & _imported(f"import {module}")


def test_help_imports_nothing_heavy():
    assert not (HEAVY | {"zmq", "numpy", "structlog", "tokenizers"}) & _imported(CALL_HELP)


def test_the_help_of_every_suite_imports_no_torch():
    """A reference page has them all, and the test of that page waits for it."""
    every = "from bench.suites import SUITES; from specq.runtime.table import resolve"
    assert not HEAVY & _imported(f"{every}; [resolve('suite', SUITES, name) for name in SUITES]")


def test_help_answers_in_a_blink():
    """Once in twenty is enough, since the machine may be busy with something else."""

    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specq", "--help"], check=True, capture_output=True)
        return time.perf_counter() - started

    assert any(seconds() < 0.3 for _ in range(20))


def test_version():
    assert _run("--version").output.strip() == f"specq, version {__version__}"


@each("name", COMMANDS)
def test_each_command_has_help(name):
    """Every command of the table exists, is summed up in the list, and explains itself."""
    result = _run(name, "--help")

    assert isinstance(resolve("command", COMMANDS, name), click.Command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert SUMMARIES[name] in _run("--help").stdout


@each(
    ("arguments", "status", "said"),
    [
        (["broker", "--bind", "tcp://0.0.0.0:1"], 2, "broker.bind is tcp://0.0.0.0:1, which others can reach"),
        (["broker", "--config", "nowhere.toml"], 2, "nowhere.toml"),
        (["worker", "--role", "draft", "--engine", "torch"], 2, "unknown option of draft engine"),
        (["worker", "--role", "draft", "--cores", "1-x"], 2, "'1-x' is no list of CPU ids such as 0,2-3"),
        (["worker", "--role", "draft", "--cores", "5-2"], 2, "'5-2' is no list of CPU ids such as 0,2-3"),
        (["worker", "--role", "draft", "--cores", f"0-{10**12}"], 2, "each at most 65535"),
        (["worker", "--role", "target", "--model", "./nowhere"], 2, "there is no model directory nowhere"),
        (["worker"], 2, "Missing option '--role'"),
        (["up", "--targets", "0"], 2, "up.targets is 0; it must be from 1"),
        (["status", "--broker", "nonsense"], 2, "client.broker is 'nonsense'"),
        (["status", "--keys", "nowhere/x"], 2, "nor a key nowhere/x.secret"),
        (
            ["broker", "--keys", "."],
            2,
            ". holds no secret key of the role broker; make one: specq keys . NAME --role broker",
        ),
        (["keys", ".", "x"], 2, "Missing option '--role'"),
        (["keys", ".", "x", "--role", "client", "--trusted"], 2, "only drafters can be trusted"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["sumbit"], 2, "No such command 'sumbit'. Did you mean 'submit'?"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, status, said):
    result = _run(*arguments)

    assert status == result.exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output


@each(
    ("keys", "said", "command"),
    [
        (keys, said, command)
        for (keys, said) in [
            ("none", "there is neither a directory of keys none nor a key none.secret"),
            ("file", "there is neither a directory of keys file nor a key file.secret"),
            ("empty", "empty holds no secret key of the role"),
            ("bad", "bad/x.secret is not a valid key file"),
            ("bad/x", "bad/x.secret is not a valid key file"),
            ("folder", "cannot read the key folder/x.secret: Is a directory"),
            ("n" * 300, "File name too long"),
            ("~nobody-of-this-name/x", "Could not determine home directory"),
        ]
        for command in [
            ["worker", "--role", "target", "--broker"],
            ["worker", "--role", "draft", "--broker"],
            ["broker", "--journal", "none", "--bind"],
            ["serve", "--bind"],
            ["up", "--model", "tiny", "--broker"],
            ["status", "--broker"],
        ]
    ],
)
def test_keys_that_cannot_be_used_are_refused_before_anything_is_loaded(
    command, keys, said, tmp_path, monkeypatch, free_address
):
    """No model is looked for, by a worker or by those that `specq up` would start."""

    def load(*_):
        raise AssertionError("a model is not to be loaded")

    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "bad", "folder/x.secret"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "bad/x.secret"):
        (tmp_path / file).write_bytes(b"\xff[")
    for name in ("target.build_verifier", "draft.build_worker", "up.Group"):
        monkeypatch.setattr(f"specq.processes.{name}", load)
    for name in ("broker", "gateway"):
        monkeypatch.setattr(f"specq.processes.{name}.apply_cpu", lambda *_, **__: None)

    result = _run(*command, free_address, "--keys", keys)

    assert result.exit_code == 2, result.output
    assert said in result.stderr.splitlines()[-1]


def test_status_without_a_broker_fails(free_address):
    result = _run("status", "--broker", free_address, "--timeout-s", "0.1")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"specq: no broker answered at {free_address}")


def test_missing_extra_says_how_to_get_it(monkeypatch):
    """A worker without torch is told which extra to install."""

    def no_torch(kind, table, name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("specq.runtime.resolve", no_torch)

    result = _run("worker", "--role", "target")

    assert result.exit_code == 2
    assert "pip install -e '.[torch]'" in result.stderr


def test_exit_status_tells_input_from_failure():
    assert [exit_status(e) for e in (ConfigError(""), JobError(""), JobError("", "lost"), EngineError(""))] == [
        2,
        2,
        1,
        1,
    ]


def test_keys_makes_two_files(tmp_path):
    """And says what each is for; the secret itself is not shown."""
    shown = _run("keys", str(tmp_path / "keys"), "laptop", "--role", "draft", "--role", "client", "--trusted")

    assert (shown.exit_code, shown.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["laptop.pub", "laptop.secret"]
    secret = tomllib.loads((tmp_path / "keys" / "laptop.secret").read_text())["secret_key"]
    assert secret not in shown.output
    public = tomllib.loads((tmp_path / "keys" / "laptop.pub").read_text())
    assert (public["roles"], public["trusted"]) == (["draft", "client"], True)


def test_models_lists_the_bundled_pair():
    listed = json.loads(_run("models", "--json").stdout)

    assert {("tiny", "target"), ("tiny", "draft")} <= {(model["name"], model["role"]) for model in listed}
    assert _run("models").stdout.splitlines()[0].split() == ["NAME", "ROLE", "SIZE", "LICENCE", "SOURCE", "PATH"]


def test_broker_process_answers_and_stops(spawn, free_address):
    """`specq broker` answers `specq status`, and SIGTERM ends it with status 0."""
    broker = spawn("broker", "--bind", free_address)
    with Client(free_address, timeout_s=30) as client:
        assert client.status()["workers"] == []

    shown = _run("status", "--broker", free_address)
    report = json.loads(_run("status", "--broker", free_address, "--json").stdout)
    broker.terminate()

    assert "no workers" in shown.stdout
    assert report["jobs"] == {"waiting": 0, "running": 0, "finished": 0}
    assert broker.wait(10) == 0


@each(
    "section",
    [
        BrokerConfig(bind="tcp://*:6000", insecure=True, max_jobs=5, cores=(0, 3)),
        TargetConfig(name="t", model="x/y", cores=(0, 1), threads=2, verbose=True),
        DraftConfig(width=4, nice=0, broker="ipc:///tmp/broker"),
        UpConfig(targets=2, drafters=0),
        ClientConfig(timeout_s=0.5),
    ],
)
def test_options_carry_a_section_whole(section):
    """The options made from a section read back as the same section; a default needs none."""

    @click.command()
    @section_options(type(section))
    def command(config_file, **values):
        return override(type(section)(), **values)

    assert section == command.main(to_arguments(section), standalone_mode=False)
    assert to_arguments(type(section)()) == []


def test_columns():
    assert columns([("NAME", "N"), ("a", 10), ("long", 5)]) == "NAME  N\na     10\nlong   5"


@each("seconds", ["nan", "-1", "inf", "soon"])
def test_seconds_to_wait_are_a_number(tmp_path, seconds):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')

    assert _run("submit", str(prompts), "--wait-seconds", seconds).exit_code == 2


@each(("command", "job"), product(["results", "cancel", "trace"], ["sea", "0", str(2**63)]))
def test_what_is_no_job_is_told_where_jobs_are_listed(command, job):
    """`specq jobs` shows the id of a prompt beside the job's number, and only the number names one."""
    result = _run(command, job)
    assert result.exit_code == 2
    assert "is not the number of a job, which `specq jobs` shows first" in " ".join(result.stderr.split())


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
{before}
from specq.__main__ import main
assert signal.getsignal(signal.SIGINT) is {handler}
"""


def test_an_interrupt_while_modules_are_imported_is_no_traceback():
    """The process ends by the signal, without a word."""
    code = INTERRUPTED.format(before="", handler="None")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@each(
    ("before", "handler"),
    [("sys.meta_path.pop(0)", "signal.default_int_handler"), ("signal.signal(2, signal.SIG_IGN)", "signal.SIG_IGN")],
)
def test_later_interrupts_are_as_they_were(before, handler):
    """Python's own handler, which click knows; ignored, where whoever started the process wants that."""
    code = INTERRUPTED.format(before=before, handler=handler)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Desk:
    """As many jobs that ended as are asked for, of 50, behind one that runs."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def list_jobs(self, limit=None):
        line = {"label": "", "tokens": 1, "age_s": 1.0, "priority": 0, "model": "tiny"}
        states = ["running", *["finished"] * min(limit if limit is not None else 50, 50)]
        return [{**line, "job_id": number, "state": state} for number, state in enumerate(states, 1)]


@each(
    ("arguments", "number", "says_more"),
    [((), 20, True), (("--limit", "7"), 7, True), (("--all",), 50, False), (("--limit", "60"), 50, False)],
)
def test_of_the_jobs_that_ended_the_newest_are_listed(monkeypatch, arguments, number, says_more):
    monkeypatch.setattr("specq.cli.jobs.JobDesk", Desk)
    shown = _run("jobs", *arguments)
    assert len(shown.stdout.splitlines()) == 2 + number
    assert ("--all lists all" in shown.stderr) is says_more
    assert len(_run("jobs", *arguments, "--json").stdout.splitlines()) == 1 + number


def test_up_takes_what_says_what_drafts_in_the_verifier(monkeypatch):
    """The options are those of `specq worker --role target`, and what is given wins over the file."""
    given = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: given.append(config) or 0)
    options = ("--lookahead", "--lookahead-window", "7", "--shared-tokens", "1000", "--heads", "smollm2")
    assert _run("up", "--model", "tiny", *options, "--prompt-lookup", "none", "--drafts", "always").exit_code == 0
    wanted = TargetConfig(
        model="tiny", lookahead=True, lookahead_window=7, shared_tokens=1000, heads="smollm2", prompt_lookup="none", drafts="always",
    )  # fmt: skip
    assert given[0].target == wanted


def test_up_takes_an_engine_and_its_options_as_a_worker_does(monkeypatch):
    given = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: given.append(config) or 0)
    assert _run("up", "--engine", "vllm", "--engine-option", "seed=0", "--engine-option", "x=1").exit_code == 0
    assert given[0].target == TargetConfig(engine="vllm", engine_options=("seed=0", "x=1"))


VLLM_CONFIG = str(Path(__file__).parents[2] / "configs" / "vllm.toml")


@each(
    "arguments",
    [
        ("up", "--config", VLLM_CONFIG),
        ("up", "--engine", "vllm", "--model", "tiny"),
        ("chat", "--config", VLLM_CONFIG, "--draft-model", "", "hi"),
    ],
)
def test_a_package_that_an_engine_lacks_is_named_before_anything_is_started(monkeypatch, arguments, free_address):
    monkeypatch.setattr("specq.processes.deployment.find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr("specq.processes.up.Group.__enter__", lambda _: pytest.fail("processes were started"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    address = ("--broker", free_address) if arguments[0] == "up" else ()
    done = _run(*arguments, *address)
    assert done.exit_code == 2
    assert done.stderr == (
        "specq: this needs vllm, which is not installed; in a clone of specq: .venv/bin/pip install -e '.[vllm]'\n"
    )


def test_an_engine_that_is_none_is_named_before_anything_is_started(monkeypatch, free_address):
    monkeypatch.setattr("specq.processes.up.Group.__enter__", lambda _: pytest.fail("processes were started"))
    done = _run("up", "--engine", "vlm", "--model", "tiny", "--broker", free_address)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "vlm" in done.stderr


@each(("draft_model", "expected"), [("", ("", 0)), ("tiny", ("tiny", AUTO_DRAFTERS))])
def test_an_empty_draft_model_is_none(monkeypatch, tmp_path, draft_model, expected):
    """On the command line; it wins over that of the file."""
    given = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: given.append(config) or 0)
    (tmp_path / "own.toml").write_text('[target]\nmodel = "tiny"\ndraft_model = "tiny"\n')
    assert _run("up", "--config", str(tmp_path / "own.toml"), "--draft-model", draft_model).exit_code == 0
    assert (given[0].target.draft_model, given[0].up.drafters) == expected


def test_an_empty_draft_model_is_none_in_a_chat_with_its_own_processes(monkeypatch):
    given = []

    def servers(config, **_):
        given.append(config)
        raise EngineError("enough is known")

    monkeypatch.setattr("specq.processes.servers.Servers", servers)
    monkeypatch.setattr("specq.cli.chat._served_models", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for options in ((), ("--draft-model", "")):
        assert "enough is known" in _run("chat", "--model", "tiny", *options, "hi").stderr
    assert [config.up.drafters for config in given] == [AUTO_DRAFTERS, 0]


def test_up_lets_pages_of_named_origins_ask(monkeypatch):
    given = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: given.append(config) or 0)
    origins = ("https://a.example", "https://b.example:8443")
    assert _run("up", "--serve", *(part for origin in origins for part in ("--cors-origin", origin))).exit_code == 0
    assert given[0].serve.cors_origins == origins


def test_up_says_where_http_is_served(monkeypatch):
    """By the options of `specq serve`; what is given wins over the file, and nothing is given in vain."""
    given = []
    monkeypatch.setattr("specq.processes.up.run", lambda config, _extra: given.append(config) or 0)
    tls = ("--tls-cert", "c.pem", "--tls-key", "k.pem", "--hosts", "llm.example.org", "--api-keys", "a.toml")
    assert _run("up", "--serve", "--bind", "tcp://127.0.0.1:9000").exit_code == 0
    assert _run("up", "--serve", "--bind", "tcp://*:9000", *tls).exit_code == 0
    assert [one.serve.bind for one in given] == ["tcp://127.0.0.1:9000", "tcp://*:9000"]
    assert (given[1].serve.tls_cert, given[1].serve.tls_key, given[1].serve.hosts) == (
        "c.pem",
        "k.pem",
        "llm.example.org",
    )

    in_the_open = _run("up", "--serve", "--bind", "tcp://*:9000")
    assert "give --api-keys and --tls-cert" in in_the_open.stderr
    assert "`insecure = true` in [serve]" in in_the_open.stderr
    for flag, value in (
        ("--bind", "tcp://127.0.0.1:9000"),
        ("--api-keys", "a.toml"),
        ("--cors-origin", "https://a.example"),
    ):
        in_vain = _run("up", flag, value)
        assert in_vain.exit_code == 2
        assert f"{flag} says how HTTP is served, which needs --serve as well" in in_vain.stderr
    assert len(given) == 2


def test_an_option_of_up_says_what_it_says_of_a_gateway():
    up, serve = (
        {one.opts[0]: one.help for one in resolve("command", COMMANDS, name).params} for name in ("up", "serve")
    )
    for option in ("--bind", "--tls-cert", "--tls-key", "--hosts", "--cors-origin"):
        assert up[option] == serve[option]


def test_an_option_of_up_says_what_it_says_of_a_verifier():
    """There is one definition of it: the key of its section."""
    up, worker = (
        {one.opts[0]: one.help for one in resolve("command", COMMANDS, name).params} for name in ("up", "worker")
    )
    for option in (
        *("--lookahead", "--lookahead-window", "--shared-tokens", "--heads", "--prompt-lookup", "--drafts"),
        "--engine",
    ):
        assert up[option].partition("  [")[0] in worker[option].replace(" (--role target only)", "")


def test_without_the_repository_bench_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"from a checkout of the repository.*specq doctor"):
        load_bench(tmp_path)

"""The command line: quick to start, one clear line for each mistake, and its options are the configuration's. Numbers
have one type for all ranges, which takes neither NaN nor infinity."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import tomllib
from itertools import product

import click
import pytest
from click.testing import CliRunner

from specq import Client, __version__
from specq.cli import COMMANDS, SUMMARIES, exit_status, main
from specq.cli.bench import load as load_bench
from specq.cli.options import section_options
from specq.config import BrokerConfig, ClientConfig, DraftConfig, TargetConfig, UpConfig, override, to_arguments
from specq.protocol.errors import ConfigError, EngineError, JobError
from specq.runtime import Number, columns, resolve
from tests.cli.test_outputs import every_command
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


def test_broker_and_client_start_without_torch():
    """One process imports them all: each must leave torch alone."""
    assert not HEAVY & _imported(
        "import specq, specq.cli, specq.client, specq.broker.core, specq.processes.broker, specq.text.codec"
    )


def test_help_imports_no_heavy_modules():
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
    ("arguments", "said"),
    [
        (["broker", "--bind", "tcp://0.0.0.0:1"], "broker.bind is tcp://0.0.0.0:1, which other machines can reach"),
        (["broker", "--config", "nowhere.toml"], "nowhere.toml"),
        (["worker", "--role", "draft", "--engine", "torch"], "unknown option of draft engine"),
        (["worker", "--role", "draft", "--cores", "1-x"], "'1-x' is not a list of CPU ids; expected e.g. 0,2-3"),
        (["worker", "--role", "draft", "--cores", "5-2"], "'5-2' is not a list of CPU ids; expected e.g. 0,2-3"),
        (["worker", "--role", "draft", "--cores", f"0-{10**12}"], "each at most 65535"),
        (["worker", "--role", "target", "--model", "./nowhere"], "there is no model directory nowhere"),
        (["worker"], "Missing option '--role'"),
        (["up", "--targets", "0"], "up.targets is 0, but must be from 1"),
        (["status", "--broker", "nonsense"], "client.broker is 'nonsense'"),
        (["status", "--keys", "nowhere/x"], "nor a key nowhere/x.secret"),
        (["broker", "--keys", "."], "role broker; create one: specq keys . NAME --role broker"),
        (["keys", ".", "x"], "Missing option '--role'"),
        (["keys", ".", "x", "--role", "client", "--trusted"], "only drafters can be trusted"),
        (["nonsense"], "No such command 'nonsense'"),
        (["sumbit"], "No such command 'sumbit'. Did you mean 'submit'?"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, said):
    result = _run(*arguments)

    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output


@each(
    ("keys", "said", "command"),
    [
        (keys, said, command)
        for (keys, said) in [
            ("none", "there is neither a directory of keys none nor a key none.secret"),
            ("file", "there is neither a directory of keys file nor a key file.secret"),
            ("empty", "empty contains no secret key of the role"),
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
    """The error of a worker without torch names the extra to install."""

    def no_torch(kind, table, name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("specq.runtime.resolve", no_torch)

    result = _run("worker", "--role", "target")

    assert result.exit_code == 2
    assert "pip install -e '.[torch]'" in result.stderr


def test_the_exit_status_distinguishes_bad_input_from_failure():
    errors = (ConfigError(""), JobError(""), JobError("", "lost"), EngineError(""))
    assert [exit_status(error) for error in errors] == [2, 2, 1, 1]


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
    assert broker.wait(60) == 0


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
def test_an_invalid_job_number_points_to_the_list_of_jobs(command, job):
    """`specq jobs` shows the id of a prompt beside the job's number, and only the number names one."""
    result = _run(command, job)
    assert result.exit_code == 2
    assert "is not a job number; `specq jobs` shows it in the first column" in " ".join(result.stderr.split())


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


@each(
    ("before", "handler", "status"),
    [
        ("", "None", -signal.SIGINT),
        ("sys.meta_path.pop(0)", "signal.default_int_handler", 0),
        ("signal.signal(2, signal.SIG_IGN)", "signal.SIG_IGN", 0),
    ],
)
def test_an_interrupt_during_imports_prints_no_traceback(before, handler, status):
    """The process ends by the signal, without a word. Later ones are as they were: Python's own handler, which click
    knows; ignored, where whoever started the process wants that."""
    code = INTERRUPTED.format(before=before, handler=handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


class Desk(contextlib.ExitStack):
    """As many jobs that ended as are asked for, of 50, behind one that runs."""

    def __init__(self, *_: object) -> None:
        super().__init__()

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


def test_without_the_repository_bench_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"needs a checkout of the repository.*specq doctor"):
        load_bench(tmp_path)


@each(
    ("kind", "value", "said"),
    [
        (kind, value, said)
        for kind in [Number(0), Number(0.01), Number(0, min_open=True)]
        for (value, said) in [
            ("nan", "nan is not a number"),
            ("inf", "inf is not a finite number"),
            ("1e400", "1e400 is not a finite number"),
            ("-inf", "-inf is not in the range x>"),
            ("-1", "-1.0 is not in the range x>"),
            ("two", "'two' is not a valid number"),
        ]
    ],
)
def test_an_invalid_number_is_refused(kind, value, said):
    with pytest.raises(click.BadParameter, match=said):
        kind.convert(value, None, None)
    assert kind.convert("2.5", None, None) == 2.5


def test_ranges_of_all_commands_are_of_that_type():
    ranges = {
        f"{name} {option.name}": option.type
        for name, command in every_command()
        for option in command.params
        if isinstance(option.type, click.FloatRange)
    }
    assert len(ranges) > 20
    assert [name for name, kind in ranges.items() if not isinstance(kind, Number)] == []

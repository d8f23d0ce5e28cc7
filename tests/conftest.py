"""What tests share: free ports, and processes that are always reaped and keep their output where a test fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from specq.broker import Broker
from specq.client.base import BaseClient
from specq.config import cache_dir
from specq.config.values import free_address
from specq.runtime.usage import available_cores, reap
from specq.testing.fake_broker import FakeBroker

# The models of tests are tiny: torch's second thread would only wait, and on a busy machine spin. Torch reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whoever wants no bytecode has each process that a test starts compile hundreds of our files anew: a second each. Git
# ignores it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Jobs that a shell runs in the background ignore SIGINT, and so would the processes of tests that are interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example takes says how busy the machine is. Each run draws the same examples: what fails is the change, not
# the draw. `--hypothesis-profile random` looks for what these do not find.
settings.register_profile("specq", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("specq")

Broker.validates = True  # of each broker in a test's own process

# Whether a broker answers within 10 s, a client's default, says how busy the machine is.
assert BaseClient.__init__.__kwdefaults__
BaseClient.__init__.__kwdefaults__["timeout_s"] = 60.0

_FAILED = pytest.StashKey[bool]()
_PATIENCE_S = 60.0

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.hookimpl(optionalhook=True)  # there is no xdist in the environment of `make test-vllm`
def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two cores: tests of processes, gateways and clients wait for most of their time."""
    return max(1, 3 * len(available_cores()) // 2)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the cycle collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Remember on the test that it failed, for the fixtures that are torn down after it."""
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture(name="free_address")
def _free_address() -> str:
    """An address of this machine that a broker can bind."""
    return free_address()


@pytest.fixture
def free_port(free_address: str) -> int:
    """A free TCP port of this machine."""
    return int(free_address.rpartition(":")[2])


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the user's own configuration."""
    for name in ("SPECQ_CONFIG", "SPECQ_BROKER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _logging_as_it_comes() -> Iterator[None]:
    """A command that ran in this process has set up logging for the whole of it."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def _journals_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Brokers of tests keep their journals with the tests' other files, also those of fixtures with a wider scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECQ_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use an empty cache instead of the user's."""
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use a cache of its own with the user's compiled kernels; return the folder of repacked models."""
    built = cache_dir() / "kernels"
    built.mkdir(parents=True, exist_ok=True, mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(built)
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "blocks"


@pytest.fixture(scope="session")
def vllm_device() -> str:
    """The kind of device that the installed vLLM runs on. Without one, the test is skipped."""
    from tests.devices import vllm_choice

    found = vllm_choice()
    if not found.kind:
        pytest.skip(found.reason)
    return found.kind


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A small broker that answers at once."""
    with FakeBroker() as fake:
        yield fake


@pytest.fixture
def spawn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spawn]:
    """Start processes (`spawn("broker", "--bind", address)` runs specq; `program=` runs another), reaped at the end.

    What they print goes to a file, `process.output`, and to the test's report if it fails. So do the stacks of the
    threads of a process that still runs then.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, program: tuple[str, ...] = (sys.executable, "-m", "specq")) -> subprocess.Popen[bytes]:
        output = tmp_path / f"process-{len(processes)}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )
        process.output = output
        processes.append(process)
        return process

    yield start
    has_failed = request.node.stash.get(_FAILED, False)
    for process in processes:
        process.send_signal(signal.SIGABRT if has_failed else signal.SIGTERM)
    for process in processes:
        reap(process, _PATIENCE_S)
    if has_failed:
        for process in processes:
            told = f"{process.args} ended with {process.returncode}\n{process.output.read_text()}"
            request.node.add_report_section("teardown", "process", told)

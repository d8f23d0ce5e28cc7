"""`specq up`: cores are divided, processes start and end together, and no process is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specq.config.sections import BrokerConfig, Config, DraftConfig, TargetConfig, UpConfig
from specq.processes.up import Group, Member, members
from specq.protocol.errors import ConfigError, EngineError
from specq.runtime import apply_cpu, available_cores, reap
from specq.runtime.log import EVERY_S, Readiness, teller
from specq.testing.waiting import wait_until
from tests.each import each

KEEP_ALIVE = """
import sys, time
from specq.processes.up import Group, Member
with Group([Member("broker", ("broker", "--bind", sys.argv[1], "--log-level", "error"), (), sys.argv[1])]) as group:
    group.wait_ready(30)
    print(group.processes["broker"].pid, flush=True)
    time.sleep(60)
"""


def test_members_of_a_configuration():
    """Each process gets its name, cores and threads, and the broker's address, on its command line."""
    config = Config(
        broker=BrokerConfig(bind="tcp://*:6000", insecure=True),
        draft=DraftConfig(width=4),
        up=UpConfig(1, 2),
        target=TargetConfig(model="tiny", heads="/heads"),
    )

    broker, target, *drafters = members(config, ["--log-level", "error"])

    assert broker.arguments[:3] == ("broker", "--bind", "tcp://*:6000")
    assert "--insecure" in broker.arguments
    assert target.arguments[:5] == ("worker", "--role", "target", "--broker", "tcp://127.0.0.1:6000")
    assert "--heads /heads" in " ".join(target.arguments)
    assert [d.name for d in drafters] == ["draft-1", "draft-2"]
    assert "--width 4" in " ".join(drafters[0].arguments)
    assert all(m.cores and set(m.cores) <= set(available_cores()) for m in (broker, target, *drafters))
    assert all(m.arguments[-2:] == ("--log-level", "error") for m in (broker, target, *drafters))


def test_cores_and_threads_of_the_file_win():
    own = available_cores()[:1]
    config = Config(target=TargetConfig(cores=own, threads=3), up=UpConfig(targets=2, drafters=0))

    targets = members(config)[1:]

    assert [t.cores for t in targets] == [own, own]
    assert all("--threads 3" in " ".join(t.arguments) for t in targets)


def test_addresses_that_cannot_serve_a_group():
    with pytest.raises(ConfigError, match=r"broker\.bind .* specq up needs a fixed port"):
        members(Config(broker=BrokerConfig(bind="tcp://127.0.0.1:*")))
    with pytest.raises(ConfigError, match=r"target\.bind .* several targets need port"):
        members(Config(target=TargetConfig(bind="tcp://127.0.0.1:1"), up=UpConfig(targets=2)))


SLIP = "there is no model 'smolm2'; did you mean 'smollm2'?"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("up", "--model", "smolm2"), SLIP),
        (("up", "--model", "tiny", "--draft-model", "smolm2"), SLIP),
        (("up", "--model", "./nosuch.gguf"), "there is no GGUF file nosuch.gguf; named models: "),
        (("up", "--model", "tiny", "--heads", "foo"), "there is no directory of heads foo; "),
        (("chat", "--model", "smolm2", "hi"), SLIP),
    ],
)
def test_an_invalid_model_is_reported_before_any_process_starts(command, said, free_address, tmp_path, spawn):
    """One line, as of `specq worker`: no process has been started that could say more."""
    (tmp_path / "own.toml").write_text(f'[broker]\nbind = "{free_address}"\n')
    process = spawn(*command, "--config", str(tmp_path / "own.toml"))
    assert process.wait(60) == 2
    (line,) = process.output.read_text().splitlines()
    assert line.startswith(f"specq: {said}")


def _broker(address: str) -> Member:
    return Member("broker", ("broker", "--bind", address, "--log-level", "error"), (), address)


def test_group_starts_and_ends_together(free_address):
    with Group([_broker(free_address)]) as group:
        assert group.wait_ready(30)
        process = group.processes["broker"]

    assert process.returncode == 0


def test_a_death_is_named(free_address, tmp_path):
    """Who ends by itself is named with its status, and the others are stopped."""
    lost = Member("draft-1", ("worker", "--role", "draft", "--model", str(tmp_path)), (), "nothing")

    with Group([_broker(free_address), lost]) as group, pytest.raises(EngineError, match=r"draft-1 .* status 2"):
        group.wait_ready(30)

    assert all(process.returncode is not None for process in group.processes.values())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_sudden_death_of_the_parent_ends_the_children(spawn, free_address):
    parent = spawn("-c", KEEP_ALIVE, free_address, program=(sys.executable,))
    pid = int(said_by(parent, "\n"))

    parent.kill()

    wait_until(lambda: not _is_alive(pid))


def said_by(process, text: str) -> str:
    """Wait until a process has said something; return all that it has said."""
    wait_until(lambda: text in process.output.read_text(), 120)
    return process.output.read_text()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_up_names_the_dead_and_fails(spawn, free_address, tmp_path):
    """`specq up` whose target cannot start ends with status 1 and says who it was."""
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    process = spawn("up", "--drafters", "0", "--broker", free_address, "--model", str(tmp_path / "cut.gguf"))

    assert process.wait(60) == 1
    said = process.output.read_text()
    assert "target-1" in said
    assert "cut.gguf is not a GGUF file" in said
    assert "ended with status 2; stopping the others" in said


def test_apply_cpu_sets_threads_and_refuses_missing_cores(monkeypatch):
    """Threads follow from the cores unless they are given; a core that is not there is refused."""
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "0")

    assert apply_cpu() == 0
    assert os.environ["OMP_NUM_THREADS"] == "0"
    assert apply_cpu(available_cores()[:1]) == 1
    assert apply_cpu(threads=3) == 3
    assert os.environ["OMP_NUM_THREADS"] == "3"
    with pytest.raises(ConfigError, match="core 4095 is not available"):
        apply_cpu((4095,))


def test_a_low_priority_process_yields_to_other_sessions_too():
    """A draft worker of `specq up` leads a session of its own. It computes on a core only while a verifier does not."""
    code = (
        "import sys, time; from specq.runtime.usage import apply_cpu, available_cores, give_way\n"
        "apply_cpu(available_cores()[:1]); give_way(int(sys.argv[1])); print(flush=True); end = "
        "float(sys.stdin.readline())\n"
        "before = time.process_time()\n"
        "while time.monotonic() < end: pass\n"
        "print(time.process_time() - before)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, nice],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )
        for nice in ("0", "19")
    ]  # fmt: skip
    try:
        for process in both:
            process.stdout.readline()  # it has started
        end = time.monotonic() + 1.0  # for both, whichever comes to the core first
        for process in both:
            process.stdin.write(f"{end}\n")
            process.stdin.flush()
        normal, idle = (float(process.communicate(timeout=60)[0]) for process in both)
    finally:
        for process in both:
            reap(process, 10)
    assert idle < normal / 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists a process's threads as Linux does")
def test_all_threads_of_a_process_give_way():
    """A draft worker lowers its priority when it is ready, after its computing threads started."""
    code = (
        "import os, threading; from pathlib import Path; from specq.runtime.usage import give_way; hold = "
        "threading.Event()\n"
        "[threading.Thread(target=hold.wait, daemon=True).start() for _ in range(3)]; give_way(7)\n"
        "print(*(os.getpriority(os.PRIO_PROCESS, int(path.name)) for path in Path('/proc/self/task').iterdir()))"
    )
    before = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    of_threads = [int(niceness) for niceness in done.stdout.split()]
    assert len(of_threads) >= 4
    assert set(of_threads) == {min(before + 7, 19)}


@each(
    ("wanted", "is_terminal", "out", "err"),
    [(True, True, "a: loading\n", ""), (False, True, "", "a: loading\n"), (False, False, "", "")],
)
def test_a_worker_that_is_started_by_itself_says_on_a_terminal_what_it_does(
    monkeypatch, capsys, wanted, is_terminal, out, err
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    teller("a", wanted=wanted)("loading")
    assert capsys.readouterr() == (out, err)


def test_sigterm_stops_all(spawn, free_address):
    """SIGTERM to a group's process ends it with status 0, and its broker with it."""
    code = (
        "import sys; from specq.config.loading import *; from specq.processes import up; up.members = lambda config, "
        "extra: [up.Member('broker', ('broker', '--bind', sys.argv[1]), (), sys.argv[1])]; sys.exit(up.run(Config()))"
    )
    process = spawn("-c", code, free_address, program=(sys.executable,))
    said = said_by(process, "Ctrl-C stops all")
    assert re.search(r"^broker: ready after \d+\.\d s$", said, re.MULTILINE)

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 0
    assert "stopped" in process.output.read_text()


def test_processes_outside_the_wait_are_not_reported():
    """In a demo, the second group is ready when the first one is."""
    told = []
    assert not Readiness(["broker", "target-1"], told.append, 100.0).note({"broker"}, 100.04)
    assert told == []


def test_readiness_is_reported_as_it_arrives():
    """Who is ready, once; and every few seconds for whom the group waits."""
    told = []
    readiness = Readiness(["broker", "target-1", "draft-1"], told.append, 100.0)

    assert not readiness.note((), 100.2)
    assert not readiness.note({"broker"}, 101.2)
    assert not readiness.note({"broker"}, 100.0 + EVERY_S)
    assert not readiness.note({"broker", "draft-1"}, 106.5)
    assert not readiness.note({"broker", "draft-1"}, 100.0 + 2 * EVERY_S)
    assert readiness.note({"broker", "draft-1", "target-1", "a stranger"}, 111.0)
    assert told == [
        "broker: ready after 1.2 s",
        "waiting for target-1, draft-1: 5 s so far",
        "draft-1: ready after 6.5 s",
        "waiting for target-1: 10 s so far",
        "target-1: ready after 11.0 s",
    ]


@pytest.mark.slow
def test_up_says_what_it_does(spawn, free_address):
    """From the start on: what is loaded, what is measured, who is ready; in this order for each process."""
    process = spawn("up", "--drafters", "1", "--broker", free_address, "--model", "tiny")
    said = said_by(process, "Ctrl-C stops all").splitlines()

    for name, second in (("target-1", "preparing steps"), ("draft-1", "warming up: compiling kernels")):
        steps = [line for line in said if line.startswith(f"{name}:")]
        assert steps[:2] == [f"{name}: loading tiny", f"{name}: {second}"]
    ready = [line.partition(":")[0] for line in said if ": ready after" in line]
    assert (ready[0], sorted(ready)) == ("broker", ["broker", "draft-1", "target-1"])

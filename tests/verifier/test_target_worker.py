"""What the verifier's process makes of its configuration, and of its peers."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from specq.config.loading import load
from specq.config.sections import TargetConfig
from specq.config.values import free_address
from specq.engines.native.steps import PooledEngine
from specq.models import resolve_model
from specq.processes import target
from specq.processes.target import VerifierLoop, build_verifier, colocated_device
from specq.protocol.errors import ConfigError
from specq.protocol.messages import Draft, Message, Open, SessionFailed, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.checkpoints_heads import make_heads
from specq.testing.toy import ToyEngine
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve, step_curves
from specq.verifier.models.step_time import StepKind, StepRows
from specq.verifier.step.verdicts import NO_REPORTS
from tests.verifier.sessions import make_draft


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [("torch", "cuda:1", "cuda:1"), ("vllm", "cuda:1", "cuda:0"), ("vllm", "cuda", "cuda:0"), ("vllm", "cpu", "cpu")],
)
def test_the_colocated_drafter_computes_where_the_engine_does(engine: str, device: str, expected: str) -> None:
    """vLLM lets its process see its own GPUs only, so that they are counted anew."""
    assert colocated_device(replace(load().target, engine=engine, device=device)) == expected


@pytest.fixture
def loop() -> Iterator[VerifierLoop]:
    """A verifier's loop with a toy engine, and no broker to register with."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.001, 0.002]), incarnation=1)
    loop = VerifierLoop(TargetConfig(broker=free_address(), bind="tcp://127.0.0.1:*"), verifier, "toy")
    yield loop
    loop.close()


class Builder:
    """Stands for what builds grammars."""

    tokenizer: Any = None
    begin: Any = None
    ready: Any = None
    cancel: Any = None
    on_ready: Callable[[], None] | None = None

    def close(self) -> None:
        pass


def test_a_grammar_that_is_built_ends_the_wait_for_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only once."""
    builder = Builder()
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.001, 0.002]), incarnation=1, grammar_builder=builder)
    loop = VerifierLoop(TargetConfig(broker=free_address(), bind="tcp://127.0.0.1:*"), verifier, "toy")
    try:
        monkeypatch.setattr(loop.links.heartbeat, "remaining_ms", lambda: 120_000)
        assert builder.on_ready is not None
        builder.on_ready()
        began = time.monotonic()
        loop.turn()
        assert time.monotonic() - began < 60
        assert dict(loop.poller.poll(0)) == {}
    finally:
        loop.close()
    builder.on_ready()  # a thread that ends late


def turn_until(loop: VerifierLoop, socket: zmq.Socket[bytes]) -> Message:
    """Let the loop turn until it has sent something to a socket; return that."""
    for _ in range(40):
        loop.turn()
        if socket.poll(10):
            return decode(socket.recv_multipart())
    raise AssertionError("nothing came")


def test_verdicts_go_to_the_peer_that_opened_the_session(loop: VerifierLoop) -> None:
    """A stranger at the verifier's socket gets its answer, and gets no verdicts of others' sessions from then on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broker, stranger = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    for socket in (broker, stranger):
        socket.connect(loop.links.hello.endpoint)
    tokens = np.array([5, 6, 7], np.int32)
    opened = {"epoch": 1, "prompt_len": 3, "params": SamplingParams(max_tokens=50), "token_ids": tokens}
    try:
        broker.send_multipart(encode(Open(session_id=1, tokens_left=50, **opened)))
        assert isinstance(turn_until(loop, broker), Verdict)
        stranger.send_multipart(encode(Open(session_id=2, tokens_left=0, **opened)))
        assert isinstance(turn_until(loop, stranger), SessionFailed)
        for _ in range(3):
            assert isinstance(turn_until(loop, broker), Verdict)
        assert not stranger.poll(0)
    finally:
        context.destroy(0)


def test_a_heartbeat_that_is_due_is_sent_before_the_step(loop: VerifierLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how long the verifier may be silent meanwhile."""
    done = list[str]()
    monkeypatch.setattr(loop.links, "beat", lambda *_, **__: done.append("beat"))
    monkeypatch.setattr(loop.links.heartbeat, "due", lambda: True)
    monkeypatch.setattr(loop.verifier, "step", lambda _: done.append("step") or NO_REPORTS)
    opened = {"epoch": 1, "prompt_len": 3, "params": SamplingParams(max_tokens=50)}
    loop.verifier.handle(Open(session_id=1, tokens_left=50, token_ids=np.array([5, 6, 7], np.int32), **opened), 0.0)
    loop.turn()
    assert done == ["beat", "step"]


def test_drafts_take_no_longer_than_a_step(loop: VerifierLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much they cost: of 40 that take 2 ms each, three are grafted before a step; what else arrives is
    handled."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broker = context.socket(zmq.DEALER)
    broker.connect(loop.links.hello.endpoint)
    tokens = np.array([5, 6, 7], np.int32)
    opened = Open(
        session_id=1, epoch=1, prompt_len=3, tokens_left=500, params=SamplingParams(max_tokens=500), token_ids=tokens
    )
    now, grafted, closed = [100.0], list[int](), list[int]()

    def handle(message: Message, _now: float, _broker: str) -> list[Message]:
        now[0] += 0.002 if isinstance(message, Draft) else 0.0
        (grafted if isinstance(message, Draft) else closed).append(1)
        return []

    try:
        monkeypatch.setattr(target, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(loop.verifier, "handle", handle)
        frames = [[b"broker", *encode(make_draft(3, i, [4], [-1]))] for i in range(40)] + [[b"broker", *encode(opened)]]
        monkeypatch.setattr(target, "drain", lambda socket: iter(frames))
        broker.send_multipart(encode(opened))  # that something has arrived
        assert loop.router.poll(5000)
        loop.turn()
        assert (len(grafted), loop.num_dropped, closed) == (3, 37, [1])
    finally:
        context.destroy(0)


def test_sessions_of_a_burst_share_their_first_step(loop: VerifierLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is put off, what arrives is handled."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broker = context.socket(zmq.DEALER)
    broker.connect(loop.links.hello.endpoint)
    tokens = np.array([5, 6, 7], np.int32)
    opened = {"epoch": 1, "prompt_len": 3, "params": SamplingParams(max_tokens=50), "token_ids": tokens}
    known = list[int]()

    def gather(_now: float) -> float:
        known.append(len(loop.verifier.sessions))
        if known[-1] == 3:
            return 0.0
        broker.send_multipart(encode(Open(session_id=known[-1] + 1, tokens_left=50, **opened)))
        return 5.0

    try:
        broker.send_multipart(encode(Open(session_id=1, tokens_left=50, **opened)))
        assert loop.router.poll(5000)
        monkeypatch.setattr(loop.verifier, "gather", gather)
        loop.turn()
        assert (known, loop.verifier.num_steps) == ([1, 2, 3], 1)
    finally:
        context.destroy(0)


def test_heads_of_the_configuration_draft_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside lookups. An invalid heads directory is refused before the target loads, which may take minutes."""
    tokenizer = load_tokenizer_files(resolve_model("tiny", "target"))["tokenizer.json"]
    heads = make_heads(tmp_path / "heads", 256, tokenizer=(num_tokens(tokenizer), tokenizer_hash(tokenizer)))
    config = TargetConfig(model="tiny", heads=str(heads), device="cpu", kv_slots=1024, max_step_rows=8)
    verifier = build_verifier(config, "target")
    assert [source.name for source in verifier.sources.sources] == ["remote", "medusa", "suffix", "grammar"]
    monkeypatch.setattr(target, "step_curves", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(
        ConfigError,
        match=r"there is no directory of heads .*`specq train medusa`, `specq train eagle3` or `specq train",
    ):
        build_verifier(replace(config, heads=str(tmp_path / "nowhere")), "target")


def cut(directory: Path) -> None:
    (path,) = directory.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 1)


def other_tokenizer(directory: Path) -> None:
    files = load_tokenizer_files(resolve_model("smollm2", "target"))
    (directory / "tokenizer.json").write_text(files["tokenizer.json"])


@pytest.mark.parametrize(
    ("pair", "damage", "said"),
    [
        ("tiny", cut, "it may be truncated"),
        ("smollm2", cut, "it may be truncated"),
        ("smollm2", lambda _: None, "its tokens cannot be compared"),
        ("tiny", other_tokenizer, "does not share"),
        ("tiny", lambda directory: (directory / "config.json").write_text("{"), "config.json"),
    ],
    ids=["cut", "own form cut", "no tokenizer", "another tokenizer", "config"],
)
def test_a_wrong_draft_model_is_refused_before_the_target_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str, damage: Callable[[Path], Any], said: str
) -> None:
    draft = shutil.copytree(resolve_model(pair, "draft"), tmp_path / "draft")
    damage(draft)
    monkeypatch.setattr(target, "_make_engine", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ConfigError, match=said):
        build_verifier(TargetConfig(model="tiny", draft_model=str(draft), device="cpu"), "target")


class Helped(ToyEngine):
    """An engine whose steps take half as long with help from other cores."""

    is_helped = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[bool, dict[int, float]] = {}

    def step_times(self, sizes: list[int]) -> list[float]:
        return [size * (0.001 if self.is_helped else 0.002) for size in sizes]

    def keep_times(self, times: dict[int, float]) -> None:
        self.kept[self.is_helped] = times


def test_a_cpu_verifier_runs_steps_of_one_row_only_before_its_first_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is profiled: the first answer would wait for that."""
    rows: list[int] = []
    launch = PooledEngine.launch

    def counted(self: PooledEngine, steps: Any, *rest: Any) -> Any:
        rows.extend(step.num_rows for step in steps)
        return launch(self, steps, *rest)

    monkeypatch.setattr(PooledEngine, "launch", counted)
    verifier = build_verifier(TargetConfig(model="tiny", draft_model="tiny", max_sessions=4), "target")
    assert set(rows) == {1}
    assert len(rows) <= 4
    assert 0 < verifier.curve(1) < verifier.curve(64)


def test_what_service_taught_is_kept_when_a_verifier_leaves() -> None:
    engine = Helped()
    verifier = Verifier(engine, StepCurve([1, 64], [0.001, 0.002]), incarnation=1)
    for _ in range(100):
        verifier.control.time.learn(StepKind(is_helped=False), StepRows(1), 0.0012)
    loop = VerifierLoop(TargetConfig(broker=free_address(), bind="tcp://127.0.0.1:*"), verifier, "toy")
    loop.close()
    assert engine.is_helped
    assert list(engine.kept) == [False]
    assert engine.kept[False][1] == pytest.approx(0.0012, rel=0.02)


def test_steps_are_expected_with_help_and_without() -> None:
    """Afterwards the engine is as it was; one that has no helpers is asked once."""
    engine = Helped()
    unhelped, helped = step_curves(engine, [1, 8])
    assert (unhelped(8), helped(8)) == (0.016, 0.008)
    assert engine.is_helped
    engine.is_helped = False
    unhelped, helped = step_curves(engine, [1, 8])
    assert unhelped is helped

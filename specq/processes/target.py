"""A verifier's process: links to the brokers, a ROUTER for the brokers' DEALERs, and one `Verifier`.

The links carry registration and heartbeats. A verifier that only dials out has no ROUTER, and the links carry all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from socket import socketpair
from typing import Any

import structlog
import zmq

from specq.config import NO_ADDRESS, TargetConfig, own_options
from specq.drafting import SAME, bridge, make_sources
from specq.engines import (
    ENGINES,
    Engine,
    EngineSpec,
    check_whole,
    drafts_on,
    local_checkpoint,
    own_levels,
    read_info,
    takes_masks,
    tokenizer_files,
    warm_up_steps,
)
from specq.grammar import GrammarBuilder, limits_of
from specq.models import default_model, resolve_model, tokenizer_of
from specq.processes.deployment import heads_at
from specq.protocol import (
    ConfigError,
    Draft,
    Frames,
    Hello,
    Message,
    Open,
    ProtocolError,
    decode,
    encode,
    fits,
    type_of,
)
from specq.runtime import HealthFile, Tell, apply_cpu, build_ahead, teller
from specq.text import load_tokenizer_files
from specq.transport import (
    AllowList,
    BrokerLinks,
    Stop,
    Zap,
    bind_router,
    broker_in,
    calm_collector,
    curve_to_broker,
    directory_of,
    drain,
    drain_named,
    new_incarnation,
    try_send,
)
from specq.verifier import NO_REPORTS, DraftSource, Reports, Setup, Verifier, profiled_rows, step_curves

log = structlog.get_logger(__name__)

GRAMMAR_BYTES = 2 << 30  # of memory for the grammars of all sessions
MANY_BUILT = 4096  # grammars noted at a time


class VerifierLoop:
    """Sockets around a `Verifier`."""

    def __init__(self, config: TargetConfig, verifier: Verifier, name: str, tell: Tell = bool) -> None:
        self.verifier = verifier
        self.drain_s = config.drain_seconds
        self.health = HealthFile()
        self.context = zmq.Context()
        curve = curve_to_broker(config.keys, "target")
        self.zap = Zap(self.context, AllowList(directory_of(config.keys), "broker")) if curve else None
        if config.bind == NO_ADDRESS:
            self.router, bound = self.context.socket(zmq.ROUTER), ""  # no peer
        else:
            self.router, bound = bind_router(self.context, config.bind, curve.own if curve else None)
        hello = Hello(
            role="target",
            name=name,
            incarnation=verifier.incarnation,
            model=verifier.engine.info,
            endpoint=config.advertise or bound,
            max_sessions=config.max_sessions,
            capabilities=verifier.capabilities,
        )
        # session -> who receives its reports: the identity of its broker's DEALER, or the name of the broker of a link
        self._openers: dict[int, bytes | str] = {}
        self.poller = zmq.Poller()
        self.links = BrokerLinks(self.context, config.broker, hello, self.poller, curve, tell)
        self.poller.register(self.router, zmq.POLLIN)
        if self.zap is not None:
            self.poller.register(self.zap.socket, zmq.POLLIN)
        self._built, self._note_built = socketpair()  # readable when a grammar has been built
        for end in (self._built, self._note_built):
            end.setblocking(False)
        self.poller.register(self._built, zmq.POLLIN)
        verifier.grammars.when_built(self._wake)
        self.num_dropped = 0
        self._unsent = NO_REPORTS  # reports of the last step

    def _wake(self) -> None:
        """End the loop's wait for messages. Called from a thread."""
        with suppress(OSError):  # full: the loop will wake up
            self._note_built.send(b"\0")

    def turn(self) -> None:
        """Send reports, handle messages, send a heartbeat if due, and run one step if there is work.

        The reports are those of the last step. `Verifier.gather` may extend the receiving phase to collect a burst of
        messages. While the device drafts for the next step, the host sends and receives. The heartbeat contains how
        long the next step may keep it silent.
        """
        self.verifier.begin(time.monotonic(), time.monotonic)
        unsent, self._unsent = self._unsent, NO_REPORTS
        self._send(unsent.and_of(self.verifier.take_grammars()))
        wait_ms = 0 if self.verifier.has_work else self.links.heartbeat.remaining_ms()
        self._hear(dict(self.poller.poll(wait_ms)))
        while wait_s := self.verifier.gather(time.monotonic()):
            self._hear(dict(self.poller.poll(ceil(1000 * wait_s))))
        if self.links.heartbeat.due():
            self._beat()
        if self.verifier.has_work:
            self._unsent = self.verifier.step(time.monotonic)

    def _beat(self) -> None:
        """Send heartbeats, and close the sessions of brokers that others have replaced. No report is unsent."""
        sessions = self.verifier.sessions
        self.health.note(self.verifier.state if self.links.registered else "waiting")
        self.links.beat(
            self.verifier.heartbeat(), self._broker_of, self.verifier.tracer.messages, num_dropped=self.num_dropped
        )
        for broker in self.links.gone((session.broker for session in sessions.values()), time.monotonic()):
            log.warning("broker_sessions_closed", broker=broker)
            self.verifier.forget_broker(broker)
        self._openers = {known: who for known, who in self._openers.items() if known in sessions}
        if self.zap is not None:
            self.zap.refresh()

    def _broker_of(self, session_id: int) -> str:
        return self.verifier.sessions[session_id].broker

    def _hear(self, ready: Mapping[Any, int]) -> None:
        """Handle the messages that have arrived.

        Drafts have a time budget (`mail_s`), over all sockets. When it is used up, further drafts are dropped.
        """
        if self.zap is not None and self.zap.socket in ready:
            self.zap.answer()
        if self._built.fileno() in ready:
            self._built.recv(MANY_BUILT)
        started = time.monotonic()
        is_late = partial(self._is_late, started + self.verifier.sources.mail_s)
        if self.router in ready:
            for identity, frames in self._arrived():
                if not is_late(frames):
                    self._take(frames, identity)
        for broker, message in self.links.receive(ready, is_late):
            self._take(message, broker)
        self.verifier.sources.account(time.monotonic() - started)

    def _is_late(self, last: float, frames: Frames) -> bool:
        """Return whether a message is a draft for which there is no time any more."""
        is_late = type_of(frames) is Draft and time.monotonic() > last
        self.num_dropped += is_late
        return is_late

    def _arrived(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the messages of brokers. Ignore a broker whose key was removed, and send it nothing more."""
        if self.zap is None:
            yield from ((identity, frames) for identity, *frames in drain(self.router))
            return
        for user_id, (identity, *frames) in drain_named(self.router):
            if self.zap.allowed.who(user_id):
                yield identity, frames
            else:
                self._openers = {known: who for known, who in self._openers.items() if who != identity}

    def _take(self, received: Message | Frames, sender: bytes | str) -> None:
        """Handle a message of a broker. Reports of a session go to the sender of its `Open`."""
        broker = sender if isinstance(sender, str) else self.links.name_of(broker_in(sender))
        try:
            message = received if isinstance(received, Message) else decode(received)
            answers = self.verifier.handle(message, time.monotonic(), broker)
        except ProtocolError as error:
            self._drop(error)
            return
        if isinstance(message, Open) and not answers:
            session = self.verifier.sessions.get(message.session_id)
            if session is not None and (session.epoch, session.broker) == (message.epoch, broker):
                self._openers[message.session_id] = sender
        for answer in answers:
            self._send_to(sender, answer)

    def _drop(self, error: ProtocolError) -> None:
        self.num_dropped += 1
        log.debug("message_dropped", reason=str(error))

    def _send_to(self, receiver: bytes | str, message: Message) -> None:
        if isinstance(receiver, str):
            self.links.send(receiver, message)
        else:
            try_send(self.router, [receiver, *encode(message)])

    def _send(self, reports: Reports) -> None:
        """Send each broker the reports of the last step on the sessions that it opened."""
        for receiver, messages in reports.by_reader(self._openers.get):
            if receiver is not None:
                for message in messages:
                    self._send_to(receiver, message)

    def serve(self, stop: Stop) -> None:
        """Serve until `stop`, then drain for at most `drain_seconds`, then close."""
        try:
            while not stop:
                self.turn()
            self._drain(stop)
        except ConfigError:  # the broker refuses this worker; no session caused it
            raise
        except BaseException:
            self.verifier.state = "failed"  # the broker counts this as a failure of the open sessions
            raise
        finally:
            self.close()

    def _drain(self, stop: Stop) -> None:
        """Let sessions move to other verifiers or end. Those without their broker are not waited for."""
        self.verifier.state, end = "draining", time.monotonic() + self.drain_s
        self.links.send_heartbeat(self.verifier.heartbeat(), self._broker_of)
        sessions = self.verifier.sessions.values()
        while any(self.links.is_served(session.broker) for session in [*sessions]) and not stop.asked_again:
            if time.monotonic() >= end:
                return
            self.turn()

    def close(self) -> None:
        """Send the last reports and a last heartbeat (state `leaving`), and close all sockets."""
        self._send(self._unsent)
        if self.verifier.state != "failed":
            self.verifier.state = "leaving"
            self.verifier.control.keep_curves()
        self.links.send_heartbeat(self.verifier.heartbeat(), self._broker_of)
        self.context.destroy()
        self.verifier.grammars.close()
        self._built.close()
        self._note_built.close()
        self.verifier.engine.shutdown()


def run(config: TargetConfig) -> int:
    """Serve until SIGTERM or SIGINT, drain, and return the exit status."""
    stop = Stop(at_once=True)
    curve_to_broker(config.keys, "target")  # report wrong keys before loading the model
    HealthFile().begin()
    build_ahead()
    apply_cpu(config.cores, config.threads)
    name = config.name or f"target-{os.getpid()}"
    tell = teller(name, wanted=config.progress)
    verifier = build_verifier(config, name, tell)
    loop = VerifierLoop(config, verifier, name, tell)
    calm_collector()
    stop.at_once = False
    loop.serve(stop)
    log.info("verifier_stopped", name=name, steps=verifier.num_steps, dropped=loop.num_dropped)
    return 0


def colocated_device(config: TargetConfig) -> str:
    """Return the device of the colocated drafter. An engine that renumbers devices gives it the first one."""
    spec: EngineSpec = ENGINES.resolve(config.engine)
    return "cuda:0" if spec.renumbers_devices and config.device.startswith("cuda") else config.device


def build_verifier(config: TargetConfig, name: str, tell: Tell = bool) -> Verifier:
    """Load the model, prepare its steps, and return the verifier."""
    started = time.monotonic()
    named = config.model or default_model()
    spec: EngineSpec = ENGINES.resolve(config.engine)
    # Report a wrong option before fetching anything.
    own = own_options(config, spec.options, ENGINES.names()).arguments()
    tell(f"loading {named}")
    model = resolve_model(named, "target")
    draft_model = resolve_model(config.draft_model, "draft") if config.draft_model else ""
    heads = heads_at(config.heads, model, named, spec)
    check_draft_model(config, model, draft_model)
    prefill_rows = max(config.max_prefill_rows or spec.prefill_rows, config.max_step_rows)
    if spec.runs_heads:
        own, heads = {**own, "heads": heads, "levels": config.chain}, ""
    engine = _make_engine(spec, config, model, named, prefill_rows, own)
    tell("preparing steps")
    unhelped, curve = step_curves(engine, profiled_rows(engine.jumps, config.max_step_rows))
    log.info(
        "engine_loaded",
        name=name,
        model=engine.info.name,
        arithmetic=engine.info.arithmetic,
        seconds=round(time.monotonic() - started, 1),
        step_ms={size: round(curve(size) * 1e3, 2) for size in (1, 8, 64)},
    )
    setup = Setup(
        *(config, engine.info, draft_model, drafts_on(engine) or colocated_device(config), tell),
        helper_cores=own.get("helper_cores", ()), target=model, heads=heads, own_levels=own_levels(engine),
        draft_tokenizer=tokenizer_of(config.draft_model, "draft") if config.draft_model else "",
    )  # fmt: skip
    sources = list(make_sources(setup))
    prepare_steps(engine, sources, prefill_rows, config.max_sessions)
    files = load_tokenizer_files(model)
    return Verifier(
        engine,
        curve,
        sources,
        incarnation=new_incarnation(),
        unhelped_curve=unhelped,
        max_sessions=config.max_sessions,
        max_step_rows=config.max_step_rows,
        max_prefill_slowdown=config.max_prefill_slowdown,
        max_prefill_rows=prefill_rows,
        trust_drafts=config.trust_drafts,
        measures_drafts=config.drafts == "measured",
        tokenizer_files=files,
        grammar_builder=_grammar_builder(files, engine, curve(1), config.max_sessions),
    )


def check_draft_model(config: TargetConfig, model: str, draft_model: str) -> None:
    """Raise ConfigError if a local draft model, if any, is damaged or does not fit the target. Only headers are read.

    So the user learns of it before the target loads, which may take minutes.
    """
    here, checkpoint = local_checkpoint(model), local_checkpoint(draft_model) if draft_model else None
    if here is None or checkpoint is None:
        return
    check_whole(checkpoint)
    draft, target = read_info(checkpoint, config.draft_model), read_info(here, config.model or default_model())
    if config.vocabulary == SAME and not fits(draft, target):
        files = tokenizer_files(tokenizer_of(config.draft_model, "draft")), tokenizer_files(model)
        bridge(draft, SAME, *files, target.name)


def _grammar_builder(files: dict[str, str], engine: Engine, step_s: float, max_sessions: int) -> GrammarBuilder | None:
    """Return what builds the grammars of jobs, for steps of `step_s` seconds; None if that is impossible here."""
    if not takes_masks(engine):
        log.info("grammars_not_served", reason=f"the {engine.info.engine} engine takes no masks")
        return None
    info, limits = engine.info, limits_of(step_s, GRAMMAR_BYTES // max_sessions)
    builder = GrammarBuilder(files, info.vocab_size, info.eos_ids, limits)
    reason = builder.prepare()
    if reason:
        log.info("grammars_not_served", reason=reason)
        builder.close()
        return None
    return builder


def _make_engine(
    spec: EngineSpec, config: TargetConfig, model: str, named: str, prefill_rows: int, own: Mapping[str, Any]
) -> Engine:
    return spec.make(
        model,
        device=config.device,
        dtype=config.dtype,
        kv_slots=config.kv_slots,
        name=named,
        threads=config.threads,
        verbose=config.verbose,
        max_sessions=config.max_sessions,
        max_step_rows=prefill_rows,
        **own,
    )


def prepare_steps(engine: Engine, sources: Sequence[DraftSource], most_rows: int, most_sessions: int) -> None:
    """Run steps of all sizes up to `most_rows`, without and with the hidden states that the sources read.

    Otherwise an engine that captures CUDA graphs on first use would delay the first sessions.
    """
    if not (engine.overlaps and engine.jumps):
        return
    started, most = time.monotonic(), min(most_rows, engine.free_slots // 2)
    read = tuple(sorted({layer for source in sources for layer in source.layers}))
    for layers in sorted({(), read}):
        warm_up_steps(engine, sorted({min(size, most) for size in engine.jumps}), layers, most_sessions)
    log.info("warmup_finished", layers=read, seconds=round(time.monotonic() - started, 1))

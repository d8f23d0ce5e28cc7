"""A draft worker's process: links to the brokers, and a `DraftWorker` that runs while it has work."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import zmq

from specq.config import DraftConfig, own_options
from specq.drafting import DRAFTERS, SAME, Drafter, DrafterSpec, as_drafter, bridge
from specq.drafting.worker import DraftWorker
from specq.engines import read_info, tokenizer_files
from specq.grammar import GrammarBuilder, limits_of
from specq.models import HEADS, default_model, resolve_model, tokenizer_of
from specq.protocol import Assign, ConfigError, Draft, ModelInfo, ProtocolError, Release, SamplingParams
from specq.runtime import HealthFile, Tell, apply_cpu, give_way, teller
from specq.transport import BrokerLinks, Stop, calm_collector, curve_to_broker, new_incarnation

log = structlog.get_logger(__name__)

PASS_S = 0.005  # of a small draft model
GRAMMAR_BYTES = 32 << 20  # of one session's grammar
WARM_CONTEXTS = (1, 12, 24, 60)  # tokens; GPU kernels depend on the rows of a pass
WARM_TEMPERATURES = (0.0, 0.8)
WARM_PASSES = 3  # passes with all contexts


class DrafterLoop:
    """Sockets around a `DraftWorker`."""

    def __init__(self, config: DraftConfig, worker: DraftWorker, name: str, tell: Tell = bool) -> None:
        self.worker = worker
        self.context = zmq.Context()
        curve = curve_to_broker(config.keys, "draft")
        self.poller = zmq.Poller()
        self.links = BrokerLinks(self.context, config.broker, worker.hello(name), self.poller, curve, tell)
        self.health = HealthFile()
        self._nice = config.nice  # not applied yet
        self.num_dropped = 0

    def turn(self) -> None:
        """Handle messages, run one pass if there is work, and send a heartbeat if it is due."""
        wait_ms = 0 if self.worker.has_work else self.links.heartbeat.remaining_ms()
        self._receive(dict(self.poller.poll(wait_ms)))
        if self._nice and self.links.registered:
            give_way(self._nice)
            self._nice = 0
        drafts = defaultdict[str, list[Draft]](list)
        for draft in self.worker.step():  # of sessions that are still there
            drafts[self._broker_of(draft.session_id)].append(draft)
        for broker, own in drafts.items():
            self.links.send_drafts(broker, own)
        if self.links.heartbeat.due():
            self._beat()

    def _beat(self) -> None:
        """Send heartbeats, and drop the sessions of brokers that others have replaced."""
        worker = self.worker
        self.health.note(worker.state if self.links.registered else "waiting")
        self.links.beat(worker.heartbeat(), self._broker_of, worker.tracer.messages, num_dropped=self.num_dropped)
        for broker in self.links.gone((session.broker for session in worker.sessions.values()), time.monotonic()):
            log.warning("broker_sessions_closed", broker=broker)
            worker.forget_broker(broker)

    def _broker_of(self, session_id: int) -> str:
        return self.worker.sessions[session_id].broker

    def _receive(self, ready: Mapping[Any, int]) -> None:
        for broker, message in self.links.receive(ready):
            try:
                self.worker.handle(message, broker)
            except ProtocolError as error:
                self.num_dropped += 1
                log.debug("message_dropped", reason=str(error))

    def close(self) -> None:
        """Send the last heartbeat (state `leaving`), and close all sockets."""
        self.worker.state = "leaving"
        self.links.send_heartbeat(self.worker.heartbeat(), self._broker_of)
        self.worker.grammars.close()
        self.context.destroy()


def run(config: DraftConfig) -> int:
    """Draft until SIGTERM or SIGINT; return the exit status."""
    stop = Stop(at_once=True)
    curve_to_broker(config.keys, "draft")  # report wrong keys before loading the model
    HealthFile().begin()
    apply_cpu(config.cores, config.threads)
    name = config.name or f"draft-{os.getpid()}"
    tell = teller(name, wanted=config.progress)
    worker = build_worker(config, tell)
    loop = DrafterLoop(config, worker, name, tell)
    log.info("drafter_started", name=name, model=worker.drafter.info.name)
    calm_collector()
    stop.at_once = False
    try:
        while not stop:
            loop.turn()
    finally:
        loop.close()
    log.info("drafter_stopped", name=name, passes=worker.num_passes, dropped=loop.num_dropped)
    return 0


def build_worker(config: DraftConfig, tell: Tell = bool) -> DraftWorker:
    """Load and warm up the model, before the broker knows the worker and expects heartbeats."""
    spec: DrafterSpec = DRAFTERS.resolve(config.proposer)
    if not isinstance(spec, DrafterSpec):
        raise ConfigError(f"the proposer {config.proposer!r} must be a specq.drafting.DrafterSpec, but is {spec!r}")
    named = (config.model or default_model()) if spec.needs_model else config.model
    # Report a wrong option before fetching anything.
    own = own_options(config, spec.options, DRAFTERS.names()).arguments()
    tell(f"loading {named if spec.needs_model else config.proposer}")
    model = resolve_model(named, HEADS if spec.reads_target else "draft") if spec.needs_model else named
    made = spec.make(
        model,
        device=config.device,
        dtype=config.dtype,
        kv_slots=config.kv_slots,
        name=named,
        distribution_size=config.distribution_size,
        **_heads(config, spec),
        **(_target_of(config) if spec.reads_target else {}),
        **own,
    )
    drafter = as_drafter(made)
    if spec.needs_model:
        _check_kv(drafter.info, config)
    if not spec.reads_target:
        drafter = _for_target(drafter, config, named)
    if spec.needs_model:
        tell("warming up: compiling kernels")
        warm_up(_worker(drafter, config))
    return _worker(drafter, config, _grammar_builder(drafter, named))


def _grammar_builder(drafter: Drafter, named: str) -> GrammarBuilder | None:
    """Return what builds the grammars of jobs; None if it drafts without, or cannot follow grammars here."""
    if not drafter.takes_masks:
        return None
    source, info = tokenizer_of(named, "draft"), drafter.info
    ends = info.eos_ids or read_info(Path(source)).eos_ids  # a draft model that has its target's tokenizer names none
    builder = GrammarBuilder(tokenizer_files(source), info.vocab_size, ends, limits_of(PASS_S, GRAMMAR_BYTES))
    if reason := builder.prepare():
        log.info("grammars_not_served", reason=reason)
        builder.close()
        return None
    return builder


def _check_kv(info: ModelInfo, config: DraftConfig) -> None:
    """Raise ConfigError if the KV slots do not suffice for the sessions of `warm_up`."""
    contexts = WARM_CONTEXTS * len(WARM_TEMPERATURES)
    least = sum(contexts) + (len(contexts) + WARM_PASSES) * max(config.width, len(contexts))
    if 0 < info.kv_slots < least:
        raise ConfigError(
            f"{info.name} has {info.kv_slots} KV slots (--kv-slots); give at least {least}, or 0 for as many as "
            f"memory allows: a session takes one slot per token of its prompt, its text and the drafts ahead of them"
        )


def _heads(config: DraftConfig, spec: DrafterSpec) -> dict[str, str]:
    """Return the argument `heads` of `make`. Raises ConfigError for a proposer without support for heads."""
    if not config.heads:
        return {}
    if not spec.takes_heads:
        raise ConfigError(
            f"draft.heads is {config.heads}, but the proposer {config.proposer} does not support heads; use draft-model"
        )
    return {"heads": resolve_model(config.heads, HEADS)}


def _target_of(config: DraftConfig) -> dict[str, str]:
    """Return the path and the name of the target whose hidden states a proposer reads."""
    target = resolve_model(config.target, "target") if config.target else ""
    return {"target": target, "target_name": config.target}


def _for_target(drafter: Drafter, config: DraftConfig, named: str) -> Drafter:
    """Return the drafter, bridged to the target's vocabulary if needed."""
    if not drafter.info.tokenizer_hash or not (config.target or config.vocabulary != SAME):
        return drafter
    if not config.target:
        raise ConfigError(
            f"draft.vocabulary is {config.vocabulary}, which needs the target's tokenizer; set draft.target"
        )
    draft_files, target_files = (
        tokenizer_files(tokenizer_of(model, role)) for model, role in ((named, "draft"), (config.target, "target"))
    )
    return bridge(drafter.info, config.vocabulary, draft_files, target_files, config.target)(drafter)


def _worker(drafter: Drafter, config: DraftConfig, builder: GrammarBuilder | None = None) -> DraftWorker:
    return DraftWorker(
        drafter,
        incarnation=new_incarnation(),
        width=config.width,
        fan_out=config.fan_out,
        max_ahead=config.max_ahead,
        chain=config.chain,
        grammar_builder=builder,
    )


def warm_up(worker: DraftWorker) -> None:
    """Draft for test sessions, alone and together, so that code is compiled before the first real session."""
    random = np.random.default_rng(0)
    for number, (length, temperature) in enumerate(product(WARM_CONTEXTS, WARM_TEMPERATURES)):
        context = random.integers(0, worker.drafter.info.num_tokens, length, np.int32)
        params, session_id = SamplingParams(temperature=temperature), -1 - number  # real sessions have ids >= 0
        worker.handle(
            Assign(session_id=session_id, epoch=0, lane=0, prompt_len=length, params=params, token_ids=context)
        )
        if worker.drafter.activations.layers and length > 1:
            states = np.zeros((length - 1, worker.drafter.width), np.float32)
            worker.drafter.observe(session_id, 1, states)
        worker.step()
    for _ in range(WARM_PASSES):
        worker.step()
    for session_id in list(worker.sessions):
        worker.handle(Release(session_id=session_id, epoch=0))

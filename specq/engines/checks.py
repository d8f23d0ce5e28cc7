"""The checks of all engines: whether a step fits session and model, and the engine works."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.engines.interface import Engine, scores_rows, takes_masks
from specq.protocol import (
    FINAL,
    EngineError,
    EngineLostError,
    Int32Array,
    IntpArray,
    ModelInfo,
    SamplingParams,
    SessionStep,
    Tap,
)
from specq.verification import StepBatch

PROBE = -1  # a session id that no job uses


def check_steps(batch: StepBatch, kv_lens: IntpArray, info: ModelInfo) -> None:
    """Raise EngineError if `check_step` raises for one of the steps. `kv_lens`, i64[n]: tokens in each session's KV."""
    ends = batch.base_lens if batch.is_plain else batch.base_lens + batch.num_nodes
    is_sound = (batch.starts == kv_lens) & (ends <= info.max_length)
    if not batch.is_plain:
        is_sound &= (batch.num_tokens > 0) & (batch.is_judged | (batch.num_nodes == 0))
    if np.count_nonzero(is_sound) == len(batch) and not batch.has_scratch:
        return
    for step, kv_len in zip(batch, kv_lens.tolist(), strict=True):
        check_step(step, kv_len, info)


def check_step(step: SessionStep, kv_len: int, info: ModelInfo) -> None:
    """Raise EngineError for a step that is empty or too long, or does not start at the end of its session's KV."""
    num_tokens, num_nodes = len(step.token_ids), step.tree.num_nodes
    if step.start != kv_len:
        raise misfit(step, f"the step starts at {step.start}; its KV holds {kv_len} tokens")
    if not num_tokens or (not step.judged and step.num_rows > num_tokens):
        raise misfit(step, "a step needs a token, and nodes and scratch rows only where it is judged")
    if kv_len + num_tokens + num_nodes > info.max_length:  # upper bound: the nodes as one chain
        longest = step.base_len + int(step.tree.depths().max(initial=0))
        if longest > info.max_length:
            raise misfit(step, f"{longest} tokens; {info.name} takes {info.max_length}")
    if step.scratch.num_rows:
        _check_scratch(step, info)
    if step.scored.num_rows > num_tokens:
        raise misfit(step, f"{step.scored.num_rows} scored rows in a step of {num_tokens} tokens")


def _check_scratch(step: SessionStep, info: ModelInfo) -> None:
    scratch, num_nodes, num_rows = step.scratch, step.tree.num_nodes, step.scratch.num_rows
    if not len(scratch.parents) == len(scratch.positions) == num_rows:
        raise misfit(step, "each scratch row needs a token, a parent and a position")
    if scratch.parents.min() < -1 or (scratch.parents >= num_nodes + np.arange(num_rows)).any():
        raise misfit(step, "a scratch row's parent is -1, a node, or an earlier scratch row")
    end = min(info.max_length, info.kv_slots)
    if scratch.positions.min() < step.base_len or scratch.positions.max() >= end:
        raise misfit(step, f"scratch rows stand at positions from {step.base_len} to {end - 1}")


def check_asked(engine: Engine, steps: Sequence[SessionStep], tap: Tap) -> None:
    """Raise EngineError if the engine does not support the requested states, scratch rows, masks or scored rows."""
    if tap.layers:
        num_layers = engine.num_tap_layers
        if not num_layers:
            raise EngineError(f"the {engine.info.engine} engine returns no hidden states")
        if min(tap.layers) < FINAL or max(tap.layers) >= num_layers:
            raise EngineError(
                f"hidden states of layers {tap.layers}; {engine.info.name} has layers 0 to {num_layers - 1}, and FINAL "
                f"({FINAL})"
            )
    if not engine.takes_scratch and StepBatch.of(steps).has_scratch:
        for step in steps:
            if step.scratch.num_rows:
                raise misfit(step, f"the {engine.info.engine} engine takes no scratch rows")
    if not takes_masks(engine) and StepBatch.of(steps).masks is not None:
        raise misfit(steps[0], f"the {engine.info.engine} engine takes no masks")
    if not scores_rows(engine) and (scored := StepBatch.of(steps).scored):
        raise misfit(steps[min(scored)], reason_against_scored(engine.info))


def reason_against_scored(info: ModelInfo) -> str:
    """Return why an engine that does not score rows refuses a job with `prompt_logprobs`."""
    return f"prompt_logprobs is not supported by the {info.engine} engine, which serves {info.name}"


def check_tokens(token_ids: Int32Array, steps: Sequence[SessionStep], info: ModelInfo) -> None:
    """Raise EngineError if a token is not in the model's vocabulary. `token_ids` are the tokens of all steps."""
    if not np.count_nonzero(token_ids.view(np.uint32) >= info.vocab_size):  # negative ids become large
        return
    for step in steps:
        own = np.concatenate([step.token_ids, step.tree.token_ids, step.scratch.token_ids])
        if own.min() < 0 or own.max() >= info.vocab_size:
            raise misfit(step, f"token ids outside [0, {info.vocab_size})")


def misfit(step: SessionStep, reason: str) -> EngineError:
    """Return the error of a step that cannot be run."""
    return EngineError(f"session {step.session_id}: {reason}")


def check_works(engine: Engine) -> None:
    """Step a session of the engine's own; raise EngineLostError if that fails.

    Used after a step failed with each of its sessions. If this step fails too, no session was at fault.
    """
    token_ids = np.zeros(1, np.int32)
    try:
        engine.open(PROBE, token_ids)
        engine.step([SessionStep(PROBE, 0, token_ids, SamplingParams())])
        engine.close(PROBE)
    except Exception as error:
        raise EngineLostError(f"the engine fails with every session: {type(error).__name__}: {error}") from error

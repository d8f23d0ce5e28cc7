"""What every engine refuses: steps that do not fit their session or the model; and whether an engine works at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.engines.interface import Engine
from specq.protocol import EngineError, EngineLostError, Int32Array, ModelInfo, SamplingParams, SessionStep

PROBE = -1  # the id of a session that is nobody's


def check_step(step: SessionStep, kv_len: int, info: ModelInfo) -> None:
    """Raise EngineError for a step that does not begin where its session's KV ends, is empty, or is too long."""
    num_tokens, num_nodes = len(step.token_ids), step.tree.num_nodes
    if step.start != kv_len:
        raise misfit(step, f"the step starts at {step.start}; its KV holds {kv_len} tokens")
    if not num_tokens or (num_nodes and not step.judged):
        raise misfit(step, "a step needs a token, and nodes only where it is judged")
    if kv_len + num_tokens + num_nodes > info.max_length:  # as deep as so many nodes can be
        longest = step.base_len + int(step.tree.depths().max(initial=0))
        if longest > info.max_length:
            raise misfit(step, f"{longest} tokens; {info.name} takes {info.max_length}")


def check_tokens(token_ids: Int32Array, steps: Sequence[SessionStep], info: ModelInfo) -> None:
    """Raise EngineError if a token is none of the model's; `token_ids` are those of all the steps."""
    if token_ids.min() >= 0 and token_ids.max() < info.vocab_size:
        return
    for step in steps:
        own = np.concatenate([step.token_ids, step.tree.token_ids])
        if own.min() < 0 or own.max() >= info.vocab_size:
            raise misfit(step, f"token ids outside [0, {info.vocab_size})")


def misfit(step: SessionStep, reason: str) -> EngineError:
    """Return the error of a step that cannot be run."""
    return EngineError(f"session {step.session_id}: {reason}")


def check_works(engine: Engine) -> None:
    """Step a session of the engine's own; raise EngineLostError if that fails. For the time after a step that failed with
    each of its sessions: if even this one fails, it was the fault of none of them."""
    token_ids = np.zeros(1, np.int32)
    try:
        engine.open(PROBE, token_ids)
        engine.step([SessionStep(PROBE, 0, token_ids, SamplingParams())])
        engine.close(PROBE)
    except Exception as error:
        raise EngineLostError(f"the engine fails with every session: {type(error).__name__}: {error}") from error

"""Engines own a model and its KV. A step is one packed forward pass for many sessions.

Input: a model, then `SessionStep`s. Output: `Judgement`s. To add an engine, write a class that fulfils `Engine` and an
`EngineSpec`. Add one line to `ENGINES`. Another package adds an entry point of the group `specq.engines` instead.
tests/engines/ runs over the table.
"""

from __future__ import annotations

from specq.engines.arithmetic import ARITHMETICS, INVARIANT
from specq.engines.checkpoint import (
    check_no_gguf,
    check_whole,
    describe,
    ends_told,
    fingerprint,
    local_checkpoint,
    read_info,
    resolve_checkpoint,
    resolve_directory,
    tokenizer_files,
)
from specq.engines.checks import check_asked, check_works, reason_against_scored
from specq.engines.interface import (
    Computed,
    Engine,
    EngineSpec,
    Launched,
    OverlappingEngine,
    drafts_on,
    even_chains,
    helped,
    is_apart,
    judges_late,
    keep_times,
    launch,
    own_levels,
    scores_rows,
    takes_masks,
    takes_unread,
    tidy,
)
from specq.engines.profiling import prefill, warm_up_steps
from specq.runtime import Table

ENGINES = Table(
    "engine",
    "specq.engines",
    {
        "auto": "specq.engines.auto_spec:AUTO",
        "torch": "specq.engines.torch_spec:TORCH",
        "native": "specq.engines.native_spec:NATIVE",
        "vllm": "specq.engines.vllm.spec:VLLM",
    },
)

__all__ = [
    "ARITHMETICS",
    "ENGINES",
    "INVARIANT",
    "Computed",
    "Engine",
    "EngineSpec",
    "Launched",
    "OverlappingEngine",
    "check_asked",
    "check_no_gguf",
    "check_whole",
    "check_works",
    "describe",
    "drafts_on",
    "ends_told",
    "even_chains",
    "fingerprint",
    "helped",
    "is_apart",
    "judges_late",
    "keep_times",
    "launch",
    "local_checkpoint",
    "own_levels",
    "prefill",
    "read_info",
    "reason_against_scored",
    "resolve_checkpoint",
    "resolve_directory",
    "scores_rows",
    "takes_masks",
    "takes_unread",
    "tidy",
    "tokenizer_files",
    "warm_up_steps",
]

"""Which arguments of vLLM's `EngineArgs` a deployment may give by name."""

from __future__ import annotations

from collections.abc import Collection

from specq.protocol import ConfigError, did_you_mean

MOST_NAMES = 3  # that are offered in the place of one that vLLM does not have

# Set by specq: the way in which vLLM is driven would break, or there is a verifier's own option for it.
RESERVED = {
    "model": "--model",
    "dtype": "--dtype",
    "max_num_seqs": "--max-sessions",
    "max_num_batched_tokens": "--max-prefill-rows",
    "num_gpu_blocks_override": "--kv-slots",
    "scheduler_cls": "",
    "worker_extension_cls": "",
    "speculative_config": "",
    "async_scheduling": "",
    "pipeline_parallel_size": "",
}


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError, which names all of them, for arguments that specq sets, and for those that vLLM does not have.

    `known`: the fields of vLLM's `EngineArgs`, empty where they are not known.
    """
    wrong = [said for name in given if (said := _wrong(name, known))]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _wrong(name: str, known: Collection[str]) -> str:
    """Return what is wrong with the name of an argument, "" if nothing is."""
    if name in RESERVED:
        own = RESERVED[name]
        return f"engine option {name} is {f'given by {own}' if own else 'set by specq'}"
    if not known or name in known:
        return ""
    hint = did_you_mean(name, set(known) - set(RESERVED), most=MOST_NAMES)
    return f"vLLM has no engine option {name}; {hint or 'none has a name like it: `vllm serve --help=all` lists them'}"

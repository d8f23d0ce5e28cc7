"""What vLLM says when it cannot start, and what to change about it, in the names of a verifier's own options. Pure."""

from __future__ import annotations

from collections.abc import Iterator

_SMALLER = "a smaller --max-model-len, --max-prefill-rows or --max-sessions, --quantization, or --tensor-parallel-size over more devices"

# What vLLM or torch says (in small letters), and what helps then. The first that fits counts.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("is less than desired",),  # vLLM looks at what is free before it loads anything
        "Others hold memory of the device: end them, or let vLLM take less by a lower --gpu-memory-utilization",
    ),
    (
        (
            "no available memory",
            "kv cache is needed",
            "to serve even a single token",
        ),  # weights fit, a text's KV does not
        f"Weights leave too little for keys and values: a higher --gpu-memory-utilization, {_SMALLER}",
    ),
    (
        ("out of memory", "can't allocate memory", "not enough memory"),
        f"Weights and a step of the largest size do not fit beside what else is there: {_SMALLER}; or a lower --gpu-memory-utilization",
    ),
    (
        ("see stack trace for root cause",),  # a worker process, of several
        "The cause is in what that process printed above; with --tensor-parallel-size 1 it would be named here",
    ),
)


def refusal(model: str, error: BaseException) -> str:
    """Return what to tell the user: vLLM's own reason on one line, those behind it, and what would help where that is
    known."""
    reason = "; ".join(dict.fromkeys(_reasons(error)))
    said = f"vLLM cannot run {model} so: {reason}"
    for signs, remedy in _REMEDIES:
        if any(sign in reason.lower() for sign in signs):
            return f"{said.rstrip('.')}. {remedy}"
    return said


def _reasons(error: BaseException | None) -> Iterator[str]:
    """Yield what an error and those behind it say, outermost first, each on one line."""
    while error is not None:
        yield " ".join(str(error).split()) or type(error).__name__
        error = error.__cause__

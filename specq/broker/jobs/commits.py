"""What the broker reads of a verdict: what it commits and counts, and no more; the rest is the drafters' to read.

A verdict is the message that the broker handles most, so it is taken apart by hand here: a quarter of the time of a whole
`specq.protocol.wire.decode`. What is read is checked as strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from specq.protocol import (
    COUNT,
    ID,
    MAX_INT32,
    MAX_INT64,
    MAX_NODES,
    MIN_ACCEPT_PROB,
    STATS,
    STEP_US,
    TOKEN_IDS,
    VERDICT_FINISH,
    ProtocolError,
    Range,
    Verdict,
    array_frame,
    decode_header,
    is_stats,
)

_TOKENS = array_frame(Verdict, "token_ids")
_NODES = array_frame(Verdict, "node_ids")
_MASK = array_frame(Verdict, "mask")
# As plain values, since a look-up of an attribute costs as much as a comparison.
_MAX_MIN_ACCEPT_PROB, _MAX_US, _FINISHES = (
    int(MIN_ACCEPT_PROB.high),
    int(cast("Range", STEP_US.of).high),
    VERDICT_FINISH.values,
)
_are_tokens = cast("Callable[[bytes], object]", TOKEN_IDS.is_plain)


@dataclass(slots=True)
class Commit:
    """A verdict as far as the broker is concerned; the fields as in `Verdict`. `raw` is its tokens' frame, `flags` says
    of each token whether it was drafted (1) or is the target's own (0)."""

    epoch: int
    base_len: int
    finish: str
    min_accept_prob: int
    us: list[int]
    stats: dict[str, Any]
    token_ids: list[int]
    raw: bytes
    flags: bytes
    num_nodes: int
    num_accepted: int
    num_bytes: int


def read_commit(frames: Sequence[bytes]) -> Commit:
    """Take a verdict's frames apart; raises ProtocolError for a malformed one."""
    header = decode_header(frames)
    epoch, base_len, min_accept_prob = header.get("epoch"), header.get("base_len"), header.get("min_accept_prob", 0)
    finish, us, stats = header.get("finish", ""), header.get("us", []), header.get("stats", {})
    if type(epoch) is not int or type(base_len) is not int or type(min_accept_prob) is not int:
        raise ProtocolError("verdict.epoch, base_len and min_accept_prob must be whole numbers")
    if not (0 <= epoch <= MAX_INT64 and 0 <= base_len <= MAX_INT32 and 0 <= min_accept_prob <= _MAX_MIN_ACCEPT_PROB):
        raise ProtocolError(
            f"verdict.epoch, base_len or min_accept_prob is not {ID.allowed}, {COUNT.allowed}, {MIN_ACCEPT_PROB.allowed}"
        )
    if type(us) is not list or (us and not _are_times(us)):
        raise ProtocolError(f"verdict.us must be none or two {STEP_US.what}")
    if finish not in _FINISHES:
        raise ProtocolError(f"verdict.finish must be {VERDICT_FINISH.allowed}")
    if type(stats) is not dict or (stats and not (STATS.admits(stats) and is_stats(stats))):
        raise ProtocolError("verdict.stats must hold what `specq.protocol.session_stats` counts, or nothing")
    tokens = frames[_TOKENS] if len(frames) > _TOKENS else b""
    nodes = frames[_NODES] if len(frames) > _NODES else b""
    mask = frames[_MASK] if len(frames) > _MASK else b""
    if len(tokens) % 4 or len(nodes) != 4 * len(mask) or len(mask) > MAX_NODES:
        raise ProtocolError(f"a verdict's arrays do not fit together, or have more than {MAX_NODES} nodes")
    if not _are_tokens(tokens):
        raise ProtocolError(f"verdict.token_ids must be {TOKEN_IDS.allowed}")
    token_ids, num_accepted = np.frombuffer(tokens, "<i4").tolist(), mask.count(1)
    return Commit(
        epoch=epoch,
        base_len=base_len,
        finish=finish,
        min_accept_prob=min_accept_prob,
        us=us,
        stats=stats,
        token_ids=token_ids,
        raw=tokens,
        flags=(b"\1" * num_accepted + bytes(len(token_ids)))[: len(token_ids)],
        num_nodes=len(mask),
        num_accepted=num_accepted,
        num_bytes=sum(map(len, frames)),
    )


def _are_times(us: list[Any]) -> bool:
    return len(us) == 2 and type(us[0]) is type(us[1]) is int and 0 <= min(us) <= max(us) <= _MAX_US


def fits_logprobs(verdict: Verdict, num_top: int) -> bool:
    """Return whether a verdict has the log-probabilities that its job asked for, of each token and of `num_top` others; -1:
    none, and what there is does no harm. The journal stores them as a row a token."""
    count = len(verdict.token_ids)
    top = {len(verdict.top_ids), len(verdict.top_logprobs)}
    return num_top < 0 or (len(verdict.logprobs) == count and top == {num_top * count})

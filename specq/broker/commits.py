"""What the broker reads of a verdict: what it commits and counts, and no more; the rest is the drafters' to read.

A verdict is the message that the broker handles most, so it is taken apart by hand here: a quarter of the time of a whole
`specq.wire.decode`. What is read is checked as strictly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specq.errors import ProtocolError
from specq.messages import Verdict
from specq.wire import array_frame, decode_header

_TOKENS = array_frame(Verdict, "token_ids")
_NODES = array_frame(Verdict, "node_ids")
_MASK = array_frame(Verdict, "mask")


@dataclass(slots=True)
class Commit:
    """A verdict as far as the broker is concerned; the fields as in `Verdict`. `raw` is its tokens' frame, `flags` says
    of each token whether it was drafted (1) or is the target's own (0)."""

    epoch: int
    base_len: int
    finish: str
    worth: int
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
    epoch, base_len = header.get("epoch"), header.get("base_len")
    finish, us, stats = header.get("finish", ""), header.get("us", []), header.get("stats", {})
    if type(epoch) is not int or type(base_len) is not int or base_len < 0:
        raise ProtocolError("verdict.epoch and verdict.base_len must be whole numbers")
    worth = header.get("worth", 0)
    if type(worth) is not int:
        raise ProtocolError("verdict.worth must be a whole number")
    if type(us) is not list or not all(type(value) is int for value in us):
        raise ProtocolError("verdict.us must be a list of whole numbers")
    if type(finish) is not str or type(stats) is not dict or len(us) not in (0, 2):
        raise ProtocolError("verdict.finish, verdict.stats or verdict.us is malformed")
    tokens = frames[_TOKENS] if len(frames) > _TOKENS else b""
    nodes = frames[_NODES] if len(frames) > _NODES else b""
    mask = frames[_MASK] if len(frames) > _MASK else b""
    if len(tokens) % 4 or len(nodes) != 4 * len(mask):
        raise ProtocolError("a verdict's arrays do not fit together")
    token_ids, num_accepted = np.frombuffer(tokens, "<i4").tolist(), mask.count(1)
    return Commit(
        epoch=epoch,
        base_len=base_len,
        finish=finish,
        worth=worth,
        us=us,
        stats=stats,
        token_ids=token_ids,
        raw=tokens,
        flags=(b"\1" * num_accepted + bytes(len(token_ids)))[: len(token_ids)],
        num_nodes=len(mask),
        num_accepted=num_accepted,
        num_bytes=sum(map(len, frames)),
    )

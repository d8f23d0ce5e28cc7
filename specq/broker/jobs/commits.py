"""What the broker reads of verdicts: what it commits and counts, and no more; the rest is the drafters' to read.

Verdicts are what the broker handles most. Those of a step come as one message of arrays. Of one that comes alone only
the header is checked as a whole: see `decode_scalars`. Of its arrays the broker reads four: 60% of the time of a whole
`decode`. What is read is checked as strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from specq.protocol import (
    MAX_NODES,
    ORIGIN_BYTES,
    ORIGIN_CODES,
    PLAIN,
    TOKEN_IDS,
    ProtocolError,
    Verdict,
    Verdicts,
    array_frame,
    decode_scalars,
    ends_of_parts,
)

_TOKENS = array_frame(Verdict, "token_ids")
_NODES = array_frame(Verdict, "node_ids")
_MASK = array_frame(Verdict, "mask")
_ORIGINS = array_frame(Verdict, "origins")
_are_tokens = cast("Callable[[bytes], object]", TOKEN_IDS.is_plain)
_are_origins = cast("Callable[[bytes], object]", ORIGIN_BYTES.is_plain)
_PLAIN = bytes([ORIGIN_CODES[PLAIN]])


@dataclass(slots=True)
class Commit:
    """A verdict as far as the broker is concerned; the fields as in `Verdict`. `raw` is its tokens' frame, `origins`
    has the code of each token."""

    session_id: int
    epoch: int
    base_len: int
    finish: str
    min_accept_prob: int
    us: tuple[int, ...]
    stats: dict[str, Any]
    cached_tokens: int
    token_ids: list[int]
    raw: bytes
    origins: bytes
    num_nodes: int
    num_accepted: int
    num_bytes: int


def read_commit(frames: Sequence[bytes]) -> Commit:
    """Take a verdict's frames apart; raises ProtocolError for a malformed one."""
    header = decode_scalars(frames, Verdict)
    tokens = frames[_TOKENS] if len(frames) > _TOKENS else b""
    nodes = frames[_NODES] if len(frames) > _NODES else b""
    mask = frames[_MASK] if len(frames) > _MASK else b""
    if len(tokens) % 4 or len(nodes) != 4 * len(mask) or len(mask) > MAX_NODES:
        raise ProtocolError(f"a verdict's arrays do not fit together, or have more than {MAX_NODES} nodes")
    if not _are_tokens(tokens):
        raise ProtocolError(f"verdict.token_ids must be {TOKEN_IDS.allowed}")
    token_ids = np.frombuffer(tokens, "<i4").tolist()
    origins = (frames[_ORIGINS] if len(frames) > _ORIGINS else b"") or _PLAIN * len(token_ids)
    if len(origins) != len(token_ids) or not _are_origins(origins):
        raise ProtocolError(f"verdict.origins must hold {ORIGIN_BYTES.allowed}, one a token, or nothing")
    return Commit(
        session_id=int.from_bytes(frames[0], "little"),
        epoch=header["epoch"],
        base_len=header["base_len"],
        finish=header.get("finish", ""),
        min_accept_prob=header.get("min_accept_prob", 0),
        us=header.get("us", ()),
        stats=header.get("stats", {}),
        cached_tokens=header.get("cached_tokens", 0),
        token_ids=token_ids,
        raw=tokens,
        origins=origins,
        num_nodes=len(mask),
        num_accepted=mask.count(1),
        num_bytes=sum(map(len, frames)),
    )


_PER_SESSION, _PER_TOKEN, _PER_NODE, _PER_SEEN = 36, 5, 6, 4  # bytes that the arrays of a step have for each
_NO_STATS: dict[str, Any] = {}


def commits_of(step: Verdicts) -> Iterator[Commit]:
    """Yield the verdicts of a step; its arrays must fit together."""
    tokens, raw, origins = step.token_ids.tolist(), step.token_ids.tobytes(), step.origins.tobytes()
    ends, node_ends = ends_of_parts(step.num_tokens), ends_of_parts(step.num_nodes)
    accepted = ends_of_parts(step.mask)[node_ends]
    num_bytes = _PER_SESSION + _PER_TOKEN * step.num_tokens + _PER_NODE * step.num_nodes + _PER_SEEN * step.num_seen
    of_verdicts = step.session_ids, step.epochs, step.base_lens, step.waited_us, num_bytes, step.num_nodes
    columns = *of_verdicts, accepted[1:] - accepted[:-1], ends[:-1], ends[1:]
    prob, us = step.min_accept_prob, step.step_us
    for session_id, epoch, base_len, waited, size, nodes, num_accepted, start, end in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        own, own_raw, own_origins = tokens[start:end], raw[4 * start : 4 * end], origins[start:end]
        yield Commit(
            session_id, epoch, base_len, "", prob, (us, waited), _NO_STATS, 0, own, own_raw, own_origins, nodes, num_accepted, size
        )  # fmt: skip


def fits_logprobs(verdict: Verdict, num_top: int) -> bool:
    """Return whether a verdict has the log-probabilities that its job asked for, of each token and of `num_top` others;
    -1: none, and what there is does no harm. The journal stores them as a row a token."""
    count = len(verdict.token_ids)
    top = {len(verdict.top_ids), len(verdict.top_logprobs)}
    return num_top < 0 or (len(verdict.logprobs) == count and top == {num_top * count})

"""Peers one version apart: what the older one wrote is read, and what it is sent it can read, or refuses as a whole.

`messages_of_version_5.json` has frames of each message type as cb5a1ef wrote them: the key, the header, the arrays.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pytest

from specq.protocol import (
    CAPABILITIES,
    Assign,
    Hello,
    ModelInfo,
    Open,
    ProtocolError,
    SamplingParams,
    Submit,
    TokenizerChunk,
    Tokens,
    Verdict,
    Welcome,
    decode,
    decode_scalars,
    encode,
    newer_fields,
    type_of,
    version_spoken,
)
from specq.protocol.messages import MESSAGES, Brokers, Drafts, Message, Moved
from specq.protocol.messages.base import Ids, Lengths, empty
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, refusal_of, since_of
from specq.testing.toy import toy_info
from specq.text import tokenizer_chunks
from tests.each import each

IDS = np.array([5], np.int32)
RECORDED = [
    [bytes.fromhex(key), header.encode("utf-8", "surrogatepass"), *map(bytes.fromhex, arrays)]
    for key, header, *arrays in json.loads(Path(__file__).with_name("messages_of_version_5.json").read_text("utf-8"))
]


def version_of(frames: list[bytes]) -> int:
    return int(orjson.loads(frames[1])["v"])


def written_as(version: int, frames: list[bytes]) -> list[bytes]:
    return [frames[0], orjson.dumps(orjson.loads(frames[1]) | {"v": version}), *frames[2:]]


@each("frames", RECORDED)
def test_what_the_version_before_wrote_is_read_and_written_the_same(frames: list[bytes]) -> None:
    """To the byte, so that it reads what this one writes."""
    assert encode(decode(frames)) == frames
    assert decode(written_as(PROTOCOL_VERSION, frames)) == decode(frames)


KEY = {"session_id": 1, "epoch": 1}
OPEN = Open(**KEY, prompt_len=1, tokens_left=5, params=SamplingParams(), owner="ann", token_ids=IDS)
HELLO = Hello(role="target", name="v", incarnation=1, model=toy_info())
ENDS = replace(toy_info(), added_eos_ids=(7,), former_fingerprint="before")
NEW: list[tuple[Message, dict[str, Any]]] = [
    (OPEN, {"by_owner": True}),
    (OPEN, {"is_background": True}),
    (OPEN, {"former_ends": True}),
    (Assign(**KEY, lane=0, prompt_len=1, params=SamplingParams(), token_ids=IDS), {"owner": "ann"}),
    (Submit(job_id=1, params=SamplingParams(), prompt_ids=IDS), {"cache_salt": "pepper"}),
    (Verdict(**KEY, base_len=1, token_ids=IDS), {"cached_tokens": 1}),
    (HELLO, {"capabilities": CAPABILITIES}),
    (HELLO, {"model": ENDS}),
    (Welcome(heartbeat_ms=10), {"capabilities": CAPABILITIES}),
    (TokenizerChunk(model=toy_info(), index=0, count=1, data=np.zeros(1, np.uint8)), {"model": ENDS}),
]


NEW_ARRAYS: list[tuple[Message, dict[str, Any]]] = [
    (message, {"prompt_rows": np.arange(4, dtype=np.uint8)})
    for message in (
        Verdict(**KEY, base_len=1, token_ids=IDS),
        Tokens(job_id=1, base_len=0, token_ids=IDS, origins=np.zeros(1, np.uint8)),
    )
]


@each(("message", "new"), NEW_ARRAYS)
def test_a_new_array_is_written_in_the_new_version_only(message: Message, new: dict[str, Any]) -> None:
    frames = encode(replace(message, **new))
    assert (version_of(encode(message)), version_of(frames)) == (OLDEST_VERSION, PROTOCOL_VERSION)
    assert decode(frames) == replace(message, **new)
    with pytest.raises(ProtocolError, match=f"{message.TYPE} has .* arrays, not"):
        decode(written_as(OLDEST_VERSION, frames))


@each(("message", "new"), NEW)
def test_what_is_new_is_written_in_the_new_version_only(message: Message, new: dict[str, Any]) -> None:
    """The old version may not contain it."""
    said = replace(message, **new)
    frames = encode(said)
    assert (version_of(encode(message)), version_of(frames)) == (OLDEST_VERSION, PROTOCOL_VERSION)
    assert (decode(frames), type_of(frames)) == (said, type(said))
    assert (newer_fields(message), newer_fields(said)) == ([], list(new))
    for read in (decode, lambda frames: decode_scalars(frames, type(said))):
        with pytest.raises(ProtocolError, match=f"{said.TYPE} of version {OLDEST_VERSION} has a field of version"):
            read(written_as(OLDEST_VERSION, frames))


def test_each_message_was_recorded_and_all_that_is_new_is_among_these() -> None:
    later = {Brokers, Drafts, Moved}  # to peers that name the capability; `Moved` for jobs of other brokers
    assert {type_of(frames) for frames in RECORDED} == set(MESSAGES.values()) - later
    kinds = [*MESSAGES.values(), ModelInfo]
    marked = {(kind, f.name) for kind in kinds for f in fields(kind) if since_of(f) > OLDEST_VERSION}
    told = {(type(message), name) for message, new in NEW + NEW_ARRAYS for name in new if name != "model"}
    assert marked == told | {(ModelInfo, "added_eos_ids")}


@each("model", [toy_info(), ENDS, replace(toy_info(), former_fingerprint="before")])
def test_a_worker_can_say_hello_to_the_version_before(model: ModelInfo) -> None:
    """A model with other ends than there is another one there: no job goes on that would end too early."""
    before = replace(HELLO, model=model, capabilities=CAPABILITIES).of_before()
    assert version_of(encode(before)) == OLDEST_VERSION
    assert before.model.former_fingerprint == ("" if model.added_eos_ids else model.former_fingerprint)
    assert before.model.fingerprint == model.fingerprint
    assert [version_of(encode(chunk)) for chunk in tokenizer_chunks(model, {"x": "y"})] == [OLDEST_VERSION]


@each(
    ("reason", "version"),
    [
        ("the broker cannot read this hello: protocol version 6; this side speaks 5", 5),
        (f"cannot read this: {refusal_of(9)}", PROTOCOL_VERSION),
        (refusal_of("x; this side speaks 1 and 2"), PROTOCOL_VERSION),
        ("submit has no field 'surprise'", 0),
        ("this side speaks 5", 0),
    ],
)
def test_a_refusal_says_what_its_sender_speaks(reason: str, version: int) -> None:
    """Also that of the version before, which said it in the same words."""
    assert version_spoken(reason) == version


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grown(Message):
    """A message that got an array and a number."""

    TYPE: ClassVar[str] = "grown"
    ids: Ids
    count: Lengths = empty("<i4")


def test_arrays_can_be_added_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are marked as other fields are."""
    grown = next(f for f in fields(Grown) if f.name == "count")
    monkeypatch.setattr(grown, "metadata", {"since": PROTOCOL_VERSION})
    monkeypatch.setitem(MESSAGES, "grown", Grown)
    old, new = (encode(Grown(ids=[1], count=count)) for count in ([], [2]))
    assert (version_of(old), version_of(new)) == (OLDEST_VERSION, PROTOCOL_VERSION)
    assert decode(new) == Grown(ids=np.array([1]), count=np.array([2], np.int32))
    with pytest.raises(ProtocolError, match="grown has 1 arrays, not 2"):
        decode(written_as(OLDEST_VERSION, new))


def test_a_version_is_a_whole_number() -> None:
    for version in (True, "6", 6.0, None, OLDEST_VERSION - 1, PROTOCOL_VERSION + 1):
        with pytest.raises(ProtocolError, match="this side speaks"):
            decode([bytes(8), orjson.dumps({"v": version, "type": "get_status"})])

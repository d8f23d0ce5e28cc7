"""Messages survive the wire. Any other input is a ProtocolError."""

import typing
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.bounds import (
    FLAGS,
    MAX_INT32,
    MODES,
    NAME,
    ORIGIN_BYTES,
    PROBABILITIES,
    Bound,
    Items,
    OneOf,
    Range,
    Text,
)
from specq.protocol.errors import ProtocolError
from specq.protocol.layout import is_array
from specq.protocol.messages import (
    MESSAGES,
    Assign,
    Draft,
    GetStatus,
    Hello,
    JobInfo,
    Message,
    Open,
    Submit,
    Verdict,
)
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.stats import StatsBound
from specq.protocol.types import ModelInfo
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from specq.protocol.wire import MAX_FRAMES, MAX_HEADER, MAX_SUBMIT_HEADER, decode, encode, too_large, type_of
from specq.testing.toy import toy_info
from tests.each import each

PARAMS: dict[object, st.SearchStrategy[typing.Any]] = {
    bool: st.booleans(),
    SamplingParams: st.builds(
        SamplingParams,
        temperature=st.floats(0, 5),
        top_p=st.floats(0.01, 1),
        seed=st.integers(0, 2**63 - 1),
        stop=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
    ),
    Speculation: st.builds(
        Speculation,
        mode=st.sampled_from(MODES),
        max_depth=st.integers(0, 99),
        tree=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    ),
    ModelInfo: st.just(toy_info()),
}


def within(bound: Bound) -> st.SearchStrategy[typing.Any]:
    """Values that a bound admits, its limits among them."""
    if isinstance(bound, Range):
        limits = st.sampled_from([int(bound.low), int(bound.high)])
        return limits | st.integers(int(bound.low), int(bound.high))
    if isinstance(bound, OneOf):
        return st.sampled_from(bound.values)
    if isinstance(bound, Text):
        return st.text(max_size=min(bound.most, 20))
    if isinstance(bound, Items):
        return st.lists(within(bound.of), min_size=bound.least, max_size=min(bound.most, 4)).map(tuple)
    names = st.sampled_from(["hits", "misses"]) if isinstance(bound, StatsBound) else st.text(max_size=5)
    return st.dictionaries(names, st.integers(0, 9), max_size=3)


TOPS = {FLAGS.is_plain: 1, ORIGIN_BYTES.is_plain: 6, PROBABILITIES.is_plain: 1}


def _field(annotation: typing.Any) -> st.SearchStrategy[typing.Any]:
    if annotation in PARAMS:
        return PARAMS[annotation]
    if not is_array(annotation):
        return within(annotation.__metadata__[0])
    bound = annotation.__metadata__[2].is_plain
    dtype, top = np.dtype(annotation.__metadata__[0]), TOPS.get(bound, 100)
    return st.lists(st.integers(0, top), max_size=9).map(lambda values: np.array(values, dtype))


def _messages() -> st.SearchStrategy[Message]:
    def build(cls: type[Message]) -> st.SearchStrategy[Message]:
        hints = typing.get_type_hints(cls, include_extras=True)
        return st.builds(cls, **{n: _field(a) for n, a in hints.items() if typing.get_origin(a) is not typing.ClassVar})

    return st.sampled_from(list(MESSAGES.values())).flatmap(build)


def _same(left: Message, right: Message) -> bool:
    names = [n for n, a in typing.get_type_hints(type(left)).items() if typing.get_origin(a) is not typing.ClassVar]
    return type(left) is type(right) and all(np.array_equal(getattr(left, n), getattr(right, n)) for n in names)


@given(_messages())
def test_every_message_survives_the_wire(message: Message) -> None:
    """decode(encode(m)) equals m for all message types."""
    frames = encode(message)
    assert _same(message, decode(frames))
    assert type_of(frames) is type(message)


@given(st.lists(st.binary(max_size=40), max_size=MAX_FRAMES + 2))
def test_garbage_is_a_protocol_error(frames: list[bytes]) -> None:
    """Random frames raise only ProtocolError."""
    with pytest.raises(ProtocolError):
        decode(frames)


@given(_messages(), st.data())
def test_a_damaged_message_is_decoded_or_refused(message: Message, data: st.DataObject) -> None:
    """A message with one byte changed decodes to a message or raises ProtocolError."""
    frames = encode(message)
    which = data.draw(st.integers(0, len(frames) - 1))
    if frames[which]:
        at = data.draw(st.integers(0, len(frames[which]) - 1))
        damaged = bytearray(frames[which])
        damaged[at] ^= data.draw(st.integers(1, 255))
        frames[which] = bytes(damaged)
    try:
        result = decode(frames)
    except ProtocolError:
        return
    assert type(result) in MESSAGES.values()


def _header(**changes: object) -> list[bytes]:
    return [bytes(8), orjson.dumps({"v": PROTOCOL_VERSION, "type": "get_status"} | changes)]


@each(
    ("frames", "reason"),
    [
        (_header(v=PROTOCOL_VERSION + 1), f"protocol version {PROTOCOL_VERSION + 1}"),
        (_header(type="nonsense"), "unknown message type"),
        (_header(surprise=1), "no field 'surprise'"),
        ([b"short", _header()[1]], "8-byte key"),
        ([bytes(8), b"x" * 100_000], "header has 100000 bytes"),
        ([*_header(), b"extra"], "has 0 arrays"),
        (_header(type="cancel", job_id=1), "no field 'job_id'"),
        (_header(type="failed", code="x"), "lacks 'reason'"),
        (_header(type="failed", code=3, reason=""), "failed.code"),
        ([*_header(type="submit", params={"top_p": 7}), b""], "submit.params"),
        ([*_header(type="submit", params={}), b"abc"], "has 3 bytes"),
    ],
)
def test_the_reason_is_named(frames: list[bytes], reason: str) -> None:
    """A refused message says what is wrong with it; what the refusals vary is itself fine."""
    assert isinstance(decode(_header()), GetStatus)
    with pytest.raises(ProtocolError, match=reason):
        decode(frames)


def test_hot_messages_are_small() -> None:
    """A draft of a chain of 8, and its verdict, stay within 200 and 208 bytes even late in a long session."""
    draft = Draft(
        session_id=2**62, epoch=2**41, lane=1, base_len=32_000, first_id=100_000,
        token_ids=np.arange(8), parent_ids=np.arange(8), scores=np.zeros(8),
    )  # fmt: skip
    verdict = Verdict(
        session_id=2**62, epoch=2**41, base_len=32_000, min_accept_prob=153, seen=(1, 100_000), us=(12_345, 6_789),
        token_ids=np.arange(9), node_ids=np.arange(8), mask=np.ones(8),
    )  # fmt: skip
    assert sum(map(len, encode(draft))) <= 200
    assert sum(map(len, encode(verdict))) <= 208


def test_a_model_without_news_is_written_as_an_older_version_reads_it() -> None:
    """Newer fields at their defaults are left out, since a version that lacks one refuses it."""
    plain = Hello(role="target", name="t", incarnation=1, model=toy_info())
    written = orjson.loads(encode(plain)[1])["model"]
    assert "added_eos_ids" not in written
    newer = replace(plain, model=replace(toy_info(), added_eos_ids=(1,)))
    assert decode(encode(newer)).model == newer.model
    assert decode(encode(plain)).model == toy_info()


def test_only_what_differs_from_the_defaults_travels() -> None:
    """Default parameters cost no bytes."""
    frames = encode(Submit(job_id=1, params=SamplingParams(top_k=5), prompt_ids=np.arange(3)))
    assert orjson.loads(frames[1]) == {"v": OLDEST_VERSION, "type": "submit", "params": {"top_k": 5}}


WIDE = "\U0001f40d"  # a character of 4 bytes
LAST = 2**63 - 1


def _what_becomes_of(job: Submit) -> list[Message]:
    """Return the messages that repeat a job, all else in them as long as it can be."""
    own = {"epoch": LAST, "prompt_len": MAX_INT32, "params": job.params, "speculation": job.speculation}
    own |= {"session_id": job.job_id, "token_ids": job.prompt_ids}
    info = JobInfo(
        job_id=job.job_id, params=job.params, model=WIDE * NAME.most, label=job.label, ended=True, elapsed_ms=2**53,
        prompt_ids=job.prompt_ids,
    )  # fmt: skip
    ends = {"owner": WIDE * NAME.most, "by_owner": True, "former_ends": True, "is_background": True}
    return [Open(tokens_left=MAX_INT32, **ends, **own), Assign(lane=255, **own), info]


def _job(num_banned: int, stop: str, label: str = "") -> Submit:
    params = SamplingParams(bad_token_ids=((12_345, 678),) * num_banned, stop=(stop,), seed=LAST)
    return Submit(job_id=1, params=params, speculation=Speculation(max_depth=7), label=label, prompt_ids=np.arange(3))


def _most(job: Callable[[int], Submit]) -> int:
    """Return the largest number of which a job is not too large."""
    return bisect_left(range(1, MAX_HEADER), True, key=lambda n: bool(too_large(job(n))))


@each(("label", "character"), product(["", "\0" * 1000, WIDE * 1000], ["x", '"', WIDE]))
def test_what_the_largest_job_becomes_can_be_decoded(label: str, character: str) -> None:
    """The largest Submit that passes: one that is a character longer does not, and says why and how large it is."""
    fits = _most(lambda n: _job(n, character, label))
    length = _most(lambda n: _job(fits, character * n, label))
    largest, larger = (_job(fits, character * n, label) for n in (length, length + 1))
    assert MAX_SUBMIT_HEADER - 10 < len(encode(largest)[1]) <= MAX_SUBMIT_HEADER
    assert [_same(decode(encode(message)), message) for message in _what_becomes_of(largest)] == [True] * 3
    assert "of them for bad_token_ids; at most" in str(too_large(larger))
    assert str(len(encode(larger)[1])) in str(too_large(larger))
    assert not too_large(replace(largest, have=LAST)), "what the client has does not travel on"


def test_the_job_limit_is_as_large_as_the_header_allows() -> None:
    """What brokers add to the largest job fills the limit of a header, but for what the type's name and a label
    take."""
    largest = _job(1, "x" * _most(lambda n: _job(1, "x" * n)))
    longest = max(len(encode(message)[1]) for message in _what_becomes_of(largest))
    assert MAX_HEADER - 100 < longest <= MAX_HEADER

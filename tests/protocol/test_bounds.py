"""Every value of every message has a bound, and what is outside is refused where it enters, with what would be
right."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from specq.broker.jobs.verdicts import fits_logprobs, read_commit
from specq.client.parameters import read_parameters
from specq.protocol import bounds
from specq.protocol.bounds import Bound, Elements, Items, Json, OneOf, PairBound, Range, Text
from specq.protocol.errors import JobError, ProtocolError
from specq.protocol.layout import check_of, is_array
from specq.protocol.messages import MESSAGES, PROTOCOL_VERSION, Draft, Failed, Heartbeat, Message, Verdict
from specq.protocol.origins import ORIGINS
from specq.protocol.params import SamplingParams, Speculation, Values
from specq.protocol.stats import StatsBound, WorkerMetricsBound
from specq.protocol.types import ModelInfo
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info
from tests.each import each

JUNK = (None, True, "x", 1.5, [], {}, [[1]], float("nan"), 1e300)


def hints(cls: type[Any]) -> dict[str, Any]:
    """The fields of a class, with what they are annotated with."""
    found = typing.get_type_hints(cls, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def scalars(cls: type[Any]) -> Iterator[tuple[str, Any, Bound]]:
    """Yield (name, type, bound) of the bounded scalars."""
    for name, hint in hints(cls).items():
        if typing.get_origin(hint) is typing.Annotated and not is_array(hint):
            yield name, hint.__origin__, hint.__metadata__[0]


WRONG_STATS: list[dict[str, Any]] = [
    {"hits": "x"}, {"hits": -1}, {"hits": True}, {"hits": [1]}, {"positions": [[1]]}, {"positions": [1]},
    {"positions": [[1, -2]]}, {"positions": {}}, {"rounds": 3}, {"hits": 1.5},
]  # fmt: skip


WRONG_METRICS: list[dict[str, Any]] = [
    {"hits": "x"}, {"hits": True}, {"hits": None}, {"hits": 2**64 - 1}, {"hits": [[1]]}, {"hits": [1, "x"]},
    {"hits": {"a": {"b": 1}}}, {"hits": {"a": [1, None]}}, {"hits": [0] * 1001}, {"x" * 101: 1},
    {"hits": {"x" * 101: 1}}, {"hits": {str(i): 0 for i in range(1001)}}, {str(i): [] for i in range(1001)},
    {str(i): {"a": [0] * 11} for i in range(100)},
]  # fmt: skip


def outside(bound: Any) -> list[Any]:
    """Return values of the right type just outside a bound, and far outside."""
    if isinstance(bound, Range):
        near = [math.nextafter(bound.low, -math.inf), math.nextafter(bound.high, math.inf)]
        found = [int(bound.low) - 1, int(bound.high) + 1, -(2**63), 2**64 - 1, *near]
        return [value for value in found if value != bound.extra]
    if isinstance(bound, OneOf | Text):
        return ["nobody's", "x" * 5000] if isinstance(bound, OneOf) else ["x" * (bound.most + 1)]
    if isinstance(bound, PairBound):
        first, second = inside(bound.first), inside(bound.second)
        firsts = [[wrong, second] for wrong in outside(bound.first)]
        return firsts + [[first, wrong] for wrong in outside(bound.second)]
    if isinstance(bound, Items):
        item = inside(bound.of)
        others = [item] * (bound.least - 1)
        too_few = [others] if bound.least else []
        return [[item] * (bound.most + 1), *too_few, *[[wrong, *others] for wrong in outside(bound.of)]]
    if isinstance(bound, StatsBound | WorkerMetricsBound):
        return WRONG_STATS if isinstance(bound, StatsBound) else WRONG_METRICS
    return [nested(bound.depth + 1), {str(i): 0 for i in range(bound.entries + 1)}, {"x": 2**64 - 1}]


def inside(bound: Any) -> Any:
    if isinstance(bound, Range):
        return bound.high if isinstance(bound.high, float) else int(bound.high)
    if isinstance(bound, PairBound):
        return [inside(bound.first), inside(bound.second)]
    if isinstance(bound, Items):
        return [inside(bound.of)] * max(bound.least, 1)
    return "x"


def nested(depth: int) -> dict[str, Any]:
    """Return a JSON object of this depth."""
    return {"x": nested(depth - 1)} if depth > 1 else {"x": 1}


# --- nothing is forgotten ---------------------------------------------------------------------------------------------


@each("cls", MESSAGES.values())
def test_every_field_of_every_message_has_a_bound(cls: type[Message]) -> None:
    """A number, text, list or object without a bound would be accepted with any value."""
    for name, hint in hints(cls).items():
        if hint is bool or hint is ModelInfo or (isinstance(hint, type) and issubclass(hint, Values)):
            continue
        assert typing.get_origin(hint) is typing.Annotated, f"{cls.TYPE}.{name} has no bound"
        kinds = (Range, OneOf, Text, Items, Json, StatsBound, WorkerMetricsBound, Elements)
        assert isinstance(hint.__metadata__[-1], kinds), f"{cls.TYPE}.{name} has no bound"


@each("cls", [SamplingParams, Speculation])
def test_every_parameter_has_a_bound(cls: type[Values]) -> None:
    """But for flags."""
    names = {field.name for field in dataclasses.fields(cls) if field.type != "bool"}
    assert set(cls.BOUNDS) == names


def test_every_value_of_a_model_has_a_bound_and_a_field_without_one_cannot_be_loaded() -> None:
    """What was forgotten shows when the module is imported."""
    assert {name for name, _, _ in scalars(ModelInfo)} == {field.name for field in dataclasses.fields(ModelInfo)}
    with pytest.raises(TypeError, match="has no bound"):
        check_of(int)


# --- messages ---------------------------------------------------------------------------------------------------------


def frames_of(cls: type[Message], **changes: Any) -> list[bytes]:
    """Return the frames of a message whose required fields are plain, but for changes of the header."""
    header: dict[str, Any] = {"v": PROTOCOL_VERSION, "type": cls.TYPE}
    plain = {str: "", int: 1, bool: False, SamplingParams: {}, ModelInfo: dataclasses.asdict(toy_info())}
    for field in dataclasses.fields(cls):
        hint = hints(cls)[field.name]
        kind = hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint
        if field.default is dataclasses.MISSING and field.name not in ("session_id", "job_id") and not is_array(hint):
            header[field.name] = plain.get(kind, {})
    if "state" in header:
        header["state"] = "ready"
    return [bytes(8), orjson.dumps(header | changes)]


CASES = [
    (cls, name, value)
    for cls in MESSAGES.values()
    for name, _, bound in scalars(cls)
    if name not in ("session_id", "job_id")
    for value in outside(bound)
]


@each("cls", MESSAGES.values())
def test_values_out_of_bounds_are_refused(cls: type[Message]) -> None:
    """The error names the field and the right values. It is short for any value."""
    assert type(decode(frames_of(cls))) is cls, "what the cases vary is itself fine"
    for of, name, value in CASES:
        if of is cls and len(orjson.dumps(value)) < 60_000:
            with pytest.raises(ProtocolError, match=rf"{cls.TYPE}\.{name} .*must be") as raised:
                decode(frames_of(cls, **{name: value}))
            assert len(str(raised.value)) < 500


@each("cls", MESSAGES.values())
def test_values_of_other_types_are_refused(cls: type[Message]) -> None:
    """A boolean is not a number, a float is not an integer, and null is not a value."""
    for name, kind, bound in scalars(cls):
        for value in JUNK:
            fits = type(value) is kind or (isinstance(value, (list, dict)) and not value)
            if not fits and name not in ("session_id", "job_id"):
                with pytest.raises(ProtocolError):
                    decode(frames_of(cls, **{name: value}))
        assert bound.allowed


@each("name", [name for name, _, _ in scalars(ModelInfo)])
def test_models_out_of_bounds_are_refused(name: str) -> None:
    bound = {name: bound for name, _, bound in scalars(ModelInfo)}[name]
    model = dataclasses.asdict(toy_info())
    for value in outside(bound):
        if len(orjson.dumps(value)) < 60_000:
            with pytest.raises(ProtocolError, match=rf"hello\.model: {name} "):
                decode(frames_of(MESSAGES["hello"], model=model | {name: value}))


def array_cases() -> Iterator[tuple[type[Message], str, Any, Any]]:
    """Yield (message, array, a wrong value, the numbers' dtype); drafts' arrays are held to more by `draft_checks`."""
    wrong = {"<i4": [-2, -(2**31)], "<i8": [-1, -(2**63)], "<f4": [math.nan, math.inf], "<u1": [2, 255]}
    for cls in MESSAGES.values():
        for name, hint in hints(cls).items():
            if is_array(hint) and hint.__metadata__[2].is_plain is not None:
                dtype = hint.__metadata__[0]
                of_origins = [len(ORIGINS), 255] if name == "origins" else None
                yield from ((cls, name, value, dtype) for value in of_origins or wrong[dtype])


@each(("cls", "name", "value", "dtype"), list(array_cases()))
def test_arrays_with_numbers_out_of_bounds_are_refused(cls: type[Message], name: str, value: Any, dtype: str) -> None:
    """Among good ones, wherever it stands."""
    arrays = [of for of, hint in hints(cls).items() if is_array(hint)]
    for place in range(3):
        found = np.ones(3, dtype)
        found[place] = value
        frames = [*frames_of(cls), *[b""] * arrays.index(name), found.tobytes()]
        with pytest.raises(ProtocolError, match=rf"{cls.TYPE}\.{name} must hold"):
            decode(frames)


def test_arrays_at_their_limits_are_let_in() -> None:
    """The largest token, minus infinity for a log-probability, -1 for what is drawn from no law."""
    verdict = Verdict(
        session_id=1, epoch=2, base_len=3, token_ids=[0, 2**31 - 1], logprobs=np.array([-np.inf, -3e38], np.float32)
    )
    judged = decode(encode(verdict))
    assert (judged.token_ids.tolist(), judged.logprobs.tolist()) == ([0, 2**31 - 1], verdict.logprobs.tolist())
    draft = Draft(session_id=1, epoch=2, lane=0, base_len=3, first_id=0, token_ids=[1], parent_ids=[-1], scores=[0],
                  q_rows=[-1], q_ids=[-1, 2**31 - 1])  # fmt: skip
    assert decode(encode(draft)).q_ids.tolist() == [-1, 2**31 - 1]


def test_too_many_nodes_are_refused() -> None:
    """A list of accepted lengths as long as a verdict's mask would fill the broker."""
    many = np.zeros(bounds.MAX_NODES + 1)
    verdict = encode(Verdict(session_id=1, epoch=2, base_len=3, token_ids=[1], node_ids=many, mask=many))
    for read in (decode, read_commit):
        with pytest.raises(ProtocolError):
            read(verdict)


# --- what the broker reads of a verdict ------------------------------------------------------------------------------


@each(("name", "value"), [(name, value) for cls, name, value in CASES if cls is Verdict])
def test_the_broker_holds_verdicts_to_the_same_bounds(name: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=rf"verdict\..*{name}|header has"):
        read_commit(frames_of(Verdict, **{name: value}))


@each("stats", WRONG_STATS)
def test_invalid_statistics_are_refused(stats: dict[str, Any]) -> None:
    """Who reads them reckons with them; `rounds` and the like are the broker's own."""
    with pytest.raises(ProtocolError, match="stats"):
        read_commit(frames_of(Verdict, stats=stats))


@each(("num_logprobs", "num_top", "fits"), [(2, 4, True), (1, 4, False), (2, 3, False), (0, 0, False)])
def test_log_probabilities_are_a_row_a_token(num_logprobs: int, num_top: int, fits: bool) -> None:
    """Others cannot be journaled; where none were asked for, any are ignored."""
    ones = {"logprobs": np.ones(num_logprobs), "top_ids": np.ones(num_top), "top_logprobs": np.ones(num_top)}
    verdict = Verdict(session_id=1, epoch=1, base_len=1, token_ids=np.array([1, 2], np.int32), **ones)
    assert fits_logprobs(verdict, 2) is fits
    assert fits_logprobs(verdict, -1)


def test_metrics_of_a_later_version_are_let_in() -> None:
    """Versions agree on names: who does not know one leaves it alone, and no worker is lost for it."""
    metrics = {"not_known_yet": {"a": [1, 2.5], "b": -3}, "neither": [0] * 900}
    beat = Heartbeat(incarnation=1, state="ready", metrics=metrics)
    assert decode(encode(beat)).metrics == metrics


def test_reasons_are_cut_where_they_are_made() -> None:
    """A waiting client gets the error, however long the reason is."""
    assert decode(encode(Failed(job_id=1, code="invalid", reason="x" * 100_000))).reason.endswith("x...")


# --- parameters -------------------------------------------------------------------------------------------------------


PARAMETERS = (bounds.SAMPLING | bounds.SPECULATION).items()
FREE = ("strategy", "seed")


@each(("name", "value"), [(name, value) for name, bound in PARAMETERS if name not in FREE for value in outside(bound)])
def test_parameters_out_of_bounds_are_refused_at_the_client_and_on_the_wire(name: str, value: Any) -> None:
    """With the same words, which name the parameter."""
    cls = SamplingParams if name in bounds.SAMPLING else Speculation
    with pytest.raises(JobError, match=rf"^{name} is .*must be") as raised:
        read_parameters({name: value})
    assert len(str(raised.value)) < 500
    with pytest.raises(JobError, match=rf"^{name} is "):
        cls.from_dict({name: value})


@each("values", [
        {"temperature": 10**400}, {"top_k": 2.0}, {"top_k": True}, {"seed": "1"},
        {"logit_bias": {"1" * 5000: 1}}, {"logit_bias": [[1.5, 1]]}, {"logit_bias": [[float("inf"), 1]]},
        {"logit_bias": {True: 1}}, {"logit_bias": [["1", 1]]}, {"logit_bias": ["12"]}, {"logit_bias": [[1, None]]},
        {"bad_token_ids": [[1e400]]}, {"bad_token_ids": [["1"]]}, {"bad_token_ids": {1: 2}}, {"bad_token_ids": [5]},
        {"logit_bias": {"-1": 1}}, {"logit_bias": {"²": 1}}, {"stop": [1]},
    ])  # fmt: skip
def test_values_that_only_look_like_numbers_are_refused(values: dict[str, Any]) -> None:
    """And raise nothing else on the way."""
    with pytest.raises(JobError, match=next(iter(values))):
        SamplingParams.from_dict(values)


@each(
    ("values", "said"),
    [
        ({"seed": 1.5}, "seed is 1.5, but must be a whole number"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1, but must be true or false"),
        ({"stop": [1]}, "must be a text, or a list of texts"),
        ({"logit_bias": [1]}, "must be an object of numbers by token id, or a list of such pairs"),
    ],
)
def test_a_wrong_type_is_named_in_words(values, said):
    """A user of HTTP or of a file need not know the names of Python's types."""
    with pytest.raises(JobError) as raised:
        SamplingParams.from_dict(values)
    assert said in str(raised.value)


def test_honest_values_are_let_in() -> None:
    """Also token ids as JSON's keys must spell them."""
    params = SamplingParams.from_dict({"top_k": 2**31 - 1, "temperature": 100, "logit_bias": {"42": -1.5}})
    assert (params.top_k, params.temperature, params.logit_bias) == (2**31 - 1, 100.0, ((42, -1.5),))

"""Messages to frames and back.

Frames: [key, 8 bytes little-endian] [header, JSON] [array 0] [array 1] ...  The header holds `v`, `type` and the scalar
fields that differ from their defaults; a message type fixes its arrays and their dtypes, lengths come from the frames.

Rule: whatever arrives, `decode` returns a valid message or raises ProtocolError; it never runs code from the wire and
never allocates more than the frames it was given.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np
import orjson

from specq.errors import JobError, ProtocolError
from specq.messages import MESSAGES, PROTOCOL_VERSION, Assign, JobInfo, Message, Open, Submit
from specq.params import SamplingParams, Speculation, Values
from specq.types import ModelInfo

Frames = list[bytes]

MAX_HEADER = 64 * 1024
MAX_ARRAY = 16 * 1024 * 1024
MAX_FRAMES = 16
MAX_NAME = 1000  # characters of the name of a worker or model
_NO_KEY = bytes(8)
_KEYS = ("session_id", "job_id")
_INT_LIMIT = 2**63


Check = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    dtype: np.dtype[Any]
    itemsize: int
    empty: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one message type lies in its frames."""

    key: str | None
    checks: dict[str, Check]  # of the scalars, by name
    defaults: tuple[tuple[str, Any], ...]  # of the scalars; MISSING where there is none
    required: frozenset[str]
    arrays: tuple[_Array, ...]


def encode(message: Message) -> Frames:
    """Return the frames of a message."""
    layout = _LAYOUTS[type(message)]
    key = _key(getattr(message, layout.key)) if layout.key else _NO_KEY
    arrays = [np.asarray(getattr(message, array.name), array.dtype).tobytes() for array in layout.arrays]
    while arrays and not arrays[-1]:
        arrays.pop()
    return [key, orjson.dumps(_header(message)), *arrays]


def _header(message: Message) -> dict[str, Any]:
    header: dict[str, Any] = {"v": PROTOCOL_VERSION, "type": message.TYPE}
    for name, default in _LAYOUTS[type(message)].defaults:
        value = getattr(message, name)
        if value != default:
            header[name] = value.to_dict() if isinstance(value, Values) else value
    return header


def _key(number: int) -> bytes:
    try:
        return number.to_bytes(8, "little")
    except OverflowError:  # an id that came in an array
        raise ProtocolError(f"{number} is no session or job") from None


def decode(frames: Sequence[bytes]) -> Message:
    """Return the message in the frames, or raise ProtocolError that says what is wrong with it."""
    header = decode_header(frames)
    cls = MESSAGES.get(header.pop("type"))
    if cls is None:
        raise ProtocolError("unknown message type")
    layout = _LAYOUTS[cls]
    values = _scalars(cls, layout, header)
    if layout.key:
        values[layout.key] = int.from_bytes(frames[0], "little")
    _add_arrays(values, cls, layout, frames)
    return cls(**values)


def array_frame(cls: type[Message], name: str) -> int:
    """Return the index of the frame that holds this array of a message type."""
    return 2 + [array.name for array in _LAYOUTS[cls].arrays].index(name)


def type_of(frames: Sequence[bytes]) -> type[Message] | None:
    """Return the message type that the header's first bytes name, or None; cheap, for routing."""
    if len(frames) < 2 or not frames[1].startswith(_PREFIX):
        return None
    name = frames[1][len(_PREFIX) : frames[1].find(b'"', len(_PREFIX))]
    return _BY_NAME.get(name)


def named_type(frames: Sequence[bytes]) -> type[Message] | None:
    """Return the message type that a header names, even one that cannot be decoded for something else; else None."""
    try:
        return MESSAGES.get(decode_header(frames)["type"])
    except ProtocolError:
        return type_of(frames)


def decode_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the header without its version, which is checked; raise ProtocolError for anything malformed."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames; a message has 2 to {MAX_FRAMES}")
    if len(frames[0]) != 8 or frames[0][7] > 127:
        raise ProtocolError("the first frame is no 8-byte key below 2**63")
    if len(frames[1]) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(frames[1])} bytes; at most {MAX_HEADER}")
    try:
        header = orjson.loads(frames[1])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError("the header is no JSON object")
    version = header.pop("v", None)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version!r}; this side speaks {PROTOCOL_VERSION}")
    if not isinstance(header.get("type"), str):
        raise ProtocolError("the header names no message type")
    return header


def _scalars(cls: type[Message], layout: _Layout, header: dict[str, Any]) -> dict[str, Any]:
    """Check the header's fields against the message type's; return them."""
    checks = layout.checks
    for name, value in header.items():
        check = checks.get(name)
        if check is None:
            raise ProtocolError(f"{cls.TYPE} has no field {name!r}")
        try:
            header[name] = check(value)
        except (TypeError, ValueError, KeyError, JobError) as error:
            raise ProtocolError(f"{cls.TYPE}.{name}: {error}") from None
    if not layout.required <= header.keys():
        raise ProtocolError(f"{cls.TYPE} lacks {min(layout.required - header.keys())!r}")
    return header


def _add_arrays(values: dict[str, Any], cls: type[Message], layout: _Layout, frames: Sequence[bytes]) -> None:
    """Add the arrays in frames 2 and up; those that are left out at the end are empty."""
    if len(frames) - 2 > len(layout.arrays):
        raise ProtocolError(f"{cls.TYPE} has {len(layout.arrays)} arrays, not {len(frames) - 2}")
    for i, array in enumerate(layout.arrays, 2):
        if i >= len(frames):
            values[array.name] = array.empty
            continue
        data = frames[i]
        if len(data) > MAX_ARRAY or len(data) % array.itemsize:
            raise ProtocolError(f"{cls.TYPE}.{array.name} has {len(data)} bytes")
        values[array.name] = np.frombuffer(data, array.dtype)


# --- building the layouts -----------------------------------------------------------------------------------------


def _check_int(value: Any) -> int:
    if type(value) is not int or not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ValueError(f"{value!r} is no 64-bit integer")
    return value


def _check_str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    return value


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is no boolean")
    return value


def _check_dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError("not a JSON object")
    return value


def _check_ints(value: Any) -> tuple[int, ...]:
    if type(value) is not list:
        raise TypeError("not a list of integers")
    return tuple(_check_int(item) for item in value)


def _check_values(cls: type[Values]) -> Check:
    return lambda value: cls.from_dict(_check_dict(value))


_SCALAR_CHECKS: dict[Any, Check] = {
    int: _check_int,
    str: _check_str,
    bool: _check_bool,
    dict[str, Any]: _check_dict,
    tuple[int, ...]: _check_ints,
    SamplingParams: _check_values(SamplingParams),
    Speculation: _check_values(Speculation),
}


def _check_model(value: Any) -> ModelInfo:
    hints = typing.get_type_hints(ModelInfo)
    return ModelInfo(**{name: _SCALAR_CHECKS[hints[name]](item) for name, item in _check_dict(value).items()})


_SCALAR_CHECKS[ModelInfo] = _check_model


def _layout(cls: type[Message]) -> _Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    key, checks, defaults, arrays = None, {}, [], []
    for spec in dataclasses.fields(cls):
        annotation = hints[spec.name]
        if spec.name in _KEYS:
            key = spec.name
        elif typing.get_origin(annotation) is typing.Annotated:
            dtype = np.dtype(annotation.__metadata__[0])
            arrays.append(_Array(spec.name, dtype, dtype.itemsize, np.frombuffer(b"", dtype)))
        else:
            checks[spec.name] = _SCALAR_CHECKS[annotation]
            factory = spec.default_factory
            defaults.append((spec.name, spec.default if factory is MISSING else factory()))
    required = frozenset(name for name, default in defaults if default is MISSING)
    return _Layout(key, checks, tuple(defaults), required, tuple(arrays))


_LAYOUTS: dict[type[Message], _Layout] = {cls: _layout(cls) for cls in MESSAGES.values()}
_BY_NAME: dict[bytes, type[Message]] = {name.encode(): cls for name, cls in MESSAGES.items()}
_PREFIX = b'{"v":%d,"type":"' % PROTOCOL_VERSION


# --- how large a job may be ---------------------------------------------------------------------------------------

_REPEATED = ("params", "speculation", "label")  # of a Submit, in what it becomes
_WIDEST = {int: -_INT_LIMIT, bool: False, str: "\U0001f40d" * MAX_NAME}  # no name has more than 4 bytes a character


def _most_added(cls: type[Message]) -> int:
    """Return the most bytes that a header of this type has beyond what it repeats of a Submit's."""
    hints = typing.get_type_hints(cls)
    own = {name: _WIDEST[hints[name]] for name in _LAYOUTS[cls].checks if name not in _REPEATED}
    return len(orjson.dumps({"v": PROTOCOL_VERSION, "type": cls.TYPE, **own}))


# Who receives what the broker makes of a job must be able to read it, so a client may say less than a broker.
MAX_SUBMIT_HEADER = MAX_HEADER - max(_most_added(cls) for cls in (Open, Assign, JobInfo))


def too_large(job: Submit) -> str:
    """Return why a job would not fit into the messages that repeat it, or ""; what counts is how this side writes it."""
    header = _header(job)
    header.pop("have", None)
    size = len(orjson.dumps(header))
    if size <= MAX_SUBMIT_HEADER:
        return ""
    values = header.get("params", {}) | header.get("speculation", {}) | {"label": job.label, "model": job.model}
    sizes = {name: len(orjson.dumps(value)) for name, value in values.items()}
    name = max(sizes, key=lambda name: sizes[name])
    return (
        f"the job takes {size} bytes beside its prompt, {sizes[name]} of them for {name}; at most {MAX_SUBMIT_HEADER}"
    )

"""Messages to frames and back.

Frames: [key, 8 bytes little-endian] [header, JSON] [array 0] [array 1] ...  The header holds `v`, `type` and the scalar
fields that differ from their defaults; a message type fixes its arrays and their dtypes, lengths come from the frames.

Rule: whatever arrives, `decode` returns a valid message, every value of it within its bound, or raises ProtocolError; it never
runs code from the wire and never allocates more than the frames it was given.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np
import orjson

from specq.protocol.bounds import MAX_INT64, NAME, Elements
from specq.protocol.errors import JobError, ProtocolError
from specq.protocol.field_checks import Check, OutOfBoundsError, check_of
from specq.protocol.messages import MESSAGES, PROTOCOL_VERSION, Assign, JobInfo, Message, Open, Submit
from specq.protocol.params import Values
from specq.protocol.types import ModelInfo

Frames = list[bytes]

MAX_HEADER = 64 * 1024
MAX_ARRAY = 16 * 1024 * 1024
MAX_FRAMES = 16
_NO_KEY = bytes(8)
_KEYS = ("session_id", "job_id")


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    dtype: np.dtype[Any]
    itemsize: int
    empty: np.ndarray[Any, Any]
    most_bytes: int
    is_plain: Callable[[bytes], object] | None
    bound: Elements


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
            header[name] = value.to_dict() if isinstance(value, Values | ModelInfo) else value
    return header


def _key(number: int) -> bytes:
    try:
        return number.to_bytes(8, "little")
    except OverflowError:  # an id that came in an array
        raise ProtocolError(f"{number} is not the id of a session or job") from None


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


def decode_scalars(frames: Sequence[bytes], cls: type[Message]) -> dict[str, Any]:
    """Return the scalar fields of a message of this type that are not at their defaults, checked; raise ProtocolError for
    anything else."""
    header = decode_header(frames)
    if header.pop("type") != cls.TYPE:
        raise ProtocolError(f"not a {cls.TYPE}")
    return _scalars(cls, _LAYOUTS[cls], header)


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
    """Return the message type that a header names, even one that cannot be decoded for something else, its version included; else
    None."""
    try:
        name = _parsed_header(frames).get("type")
    except ProtocolError:
        return type_of(frames)
    return MESSAGES.get(name) if isinstance(name, str) else None


def in_version_of(asked: Sequence[bytes], answer: Frames) -> Frames:
    """Return the frames of an answer under the protocol version of what it answers, so that a peer of another version reads it: for
    messages that are the same in all."""
    try:
        version = _parsed_header(asked).get("v")
    except ProtocolError:
        return answer
    if type(version) is not int or version == PROTOCOL_VERSION:
        return answer
    return [answer[0], orjson.dumps({**orjson.loads(answer[1]), "v": version}), *answer[2:]]


def decode_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the header without its version, which is checked; raise ProtocolError for anything malformed."""
    header = _parsed_header(frames)
    version = header.pop("v", None)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version!r}; this side speaks {PROTOCOL_VERSION}")
    if not isinstance(header.get("type"), str):
        raise ProtocolError("the header names no message type")
    return header


def _parsed_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the header with its version, of whatever version; raise ProtocolError for what is none in any."""
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames; a message has 2 to {MAX_FRAMES}")
    if len(frames[0]) != 8 or frames[0][7] > 127:
        raise ProtocolError("the first frame is not an 8-byte key below 2**63")
    if len(frames[1]) > MAX_HEADER:
        raise ProtocolError(f"a header of {len(frames[1])} bytes; at most {MAX_HEADER}")
    try:
        header = orjson.loads(frames[1])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError("the header is not a JSON object")
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
        except OutOfBoundsError as error:
            raise ProtocolError(f"{cls.TYPE}.{name} {error}") from None
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
        if len(data) > array.most_bytes or len(data) % array.itemsize:
            raise ProtocolError(f"{cls.TYPE}.{array.name} has {len(data)} bytes; {_sizes(array)}")
        values[array.name] = np.frombuffer(data, array.dtype)
        if array.is_plain is not None and not array.is_plain(data):
            _check_elements(cls, array, values[array.name])


def _check_elements(cls: type[Message], array: _Array, found: np.ndarray[Any, Any]) -> None:
    if array.bound.admits is None or not array.bound.admits(found):
        raise ProtocolError(f"{cls.TYPE}.{array.name} must hold {array.bound.allowed}")


def _sizes(array: _Array) -> str:
    return f"it has {array.itemsize} for each element, and at most {array.most_bytes}"


# --- building the layouts -----------------------------------------------------------------------------------------


def is_array(annotation: Any) -> bool:
    """Return whether a field of a message is an array."""
    return typing.get_origin(annotation) is typing.Annotated and isinstance(annotation.__metadata__[0], str)


def _array(name: str, annotation: Any) -> _Array:
    dtype_name, _, bound = annotation.__metadata__
    dtype = np.dtype(dtype_name)
    most_bytes = min(MAX_ARRAY, bound.most * dtype.itemsize)
    return _Array(name, dtype, dtype.itemsize, np.frombuffer(b"", dtype), most_bytes, bound.is_plain, bound)


def _layout(cls: type[Message]) -> _Layout:
    hints = typing.get_type_hints(cls, include_extras=True)
    key, checks, defaults, arrays = None, {}, [], []
    for spec in dataclasses.fields(cls):
        annotation = hints[spec.name]
        if spec.name in _KEYS:
            key = spec.name
        elif is_array(annotation):
            arrays.append(_array(spec.name, annotation))
        else:
            checks[spec.name] = check_of(annotation)
            factory = spec.default_factory
            defaults.append((spec.name, spec.default if factory is MISSING else factory()))
    required = frozenset(name for name, default in defaults if default is MISSING)
    return _Layout(key, checks, tuple(defaults), required, tuple(arrays))


_LAYOUTS: dict[type[Message], _Layout] = {cls: _layout(cls) for cls in MESSAGES.values()}
_BY_NAME: dict[bytes, type[Message]] = {name.encode(): cls for name, cls in MESSAGES.items()}
_PREFIX = b'{"v":%d,"type":"' % PROTOCOL_VERSION


# --- how large a job may be ---------------------------------------------------------------------------------------

_REPEATED = ("params", "speculation", "label")  # of a Submit, in what it becomes
_WIDEST = {int: -MAX_INT64, bool: False, str: "\U0001f40d" * NAME.most}  # no name has more than 4 bytes a character


def _most_added(cls: type[Message]) -> int:
    """Return the most bytes that a header of this type has beyond what it repeats of a Submit's."""
    hints = typing.get_type_hints(cls)
    own = {name: _WIDEST[hints[name]] for name in _LAYOUTS[cls].checks if name not in _REPEATED}
    return len(orjson.dumps({"v": PROTOCOL_VERSION, "type": cls.TYPE, **own}))


# Who receives what the broker makes of a job must be able to read it, so a client may say less than a broker.
MAX_SUBMIT_HEADER = MAX_HEADER - max(_most_added(cls) for cls in (Open, Assign, JobInfo))


def too_large(job: Submit) -> JobError | None:
    """Return why a job would not fit into the messages that repeat it; what counts is how this side writes it."""
    header = _header(job)
    header.pop("have", None)
    size = len(orjson.dumps(header))
    if size <= MAX_SUBMIT_HEADER:
        return None
    values = header.get("params", {}) | header.get("speculation", {}) | {"label": job.label, "model": job.model}
    sizes = {name: len(orjson.dumps(value)) for name, value in values.items()}
    name = max(sizes, key=lambda name: sizes[name])
    reason = (
        f"the job takes {size} bytes beside its prompt, {sizes[name]} of them for {name}; at most {MAX_SUBMIT_HEADER}"
    )
    return JobError(reason, field=name)

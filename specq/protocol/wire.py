"""Messages to frames and back.

Frames: [key, 8 bytes little-endian] [header, JSON] [array 0] [array 1] ... The header holds `v`, `type` and the scalar
fields that differ from their defaults. A message type fixes its arrays and their dtypes. Lengths come from the frames.
`v` is the oldest version that has all of the message's content (`specq.protocol.versions`).

Rule: for any input, `decode` returns a valid message or raises ProtocolError. Every value is within its bound. It never
runs code from the wire, and never allocates more than the given frames.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from specq.protocol.bounds import MAX_INT64, NAME
from specq.protocol.errors import JobError, ProtocolError
from specq.protocol.layout import ArrayLayout, Layout, OutOfBoundsError, layout_of
from specq.protocol.messages import MESSAGES, Assign, JobInfo, Message, Open, Submit
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, refusal_of

Frames = list[bytes]

MAX_HEADER = 64 * 1024
MAX_FRAMES = 16
_NO_KEY = bytes(8)


def encode(message: Message) -> Frames:
    """Return the frames of a message."""
    layout = layout_of(type(message))
    key = _key(getattr(message, layout.key)) if layout.key else _NO_KEY
    arrays = [np.asarray(getattr(message, array.name), array.dtype).tobytes() for array in layout.arrays]
    while arrays and not arrays[-1]:
        arrays.pop()
    header = _header(message)
    if arrays:
        header["v"] = max(header["v"], layout.arrays[len(arrays) - 1].version)
    return [key, orjson.dumps(header), *arrays]


def _header(message: Message) -> dict[str, Any]:
    layout = layout_of(type(message))
    header: dict[str, Any] = {"v": OLDEST_VERSION, "type": message.TYPE}
    for name, default in layout.defaults:
        value = getattr(message, name)
        if value != default:
            header[name] = value
    header["v"] = layout.version(header)
    for name in layout.objects & header.keys():
        header[name] = header[name].to_dict()
    return header


def newer_fields(message: Message) -> list[str]:
    """Return the names of the scalars for which a peer of the oldest version refuses a message."""
    newer = layout_of(type(message)).newer
    return [n.of for n in newer if n.value(getattr(message, n.of)) != n.default]


def _key(number: int) -> bytes:
    try:
        return number.to_bytes(8, "little")
    except OverflowError:  # an id that came in an array
        raise ProtocolError(f"{number} is not the id of a session or job") from None


def decode(frames: Sequence[bytes]) -> Message:
    """Return the message in the frames.

    Raises ProtocolError with the reason if the frames are invalid.
    """
    version, header = _readable_header(frames)
    cls = MESSAGES.get(header.pop("type"))
    if cls is None:
        raise ProtocolError("unknown message type")
    layout = layout_of(cls)
    values = _scalars(cls, layout, header, version)
    if layout.key:
        values[layout.key] = int.from_bytes(frames[0], "little")
    _add_arrays(values, cls, layout, frames, version)
    return cls(**values)


def decode_scalars(frames: Sequence[bytes], cls: type[Message]) -> dict[str, Any]:
    """Return the checked scalar fields of a message of this type that differ from their defaults.

    Raises ProtocolError for any other input.
    """
    version, header = _readable_header(frames)
    if header.pop("type") != cls.TYPE:
        raise ProtocolError(f"not a {cls.TYPE}")
    return _scalars(cls, layout_of(cls), header, version)


def array_frame(cls: type[Message], name: str) -> int:
    """Return the index of the frame that holds this array of a message type."""
    return 2 + [array.name for array in layout_of(cls).arrays].index(name)


def type_of(frames: Sequence[bytes]) -> type[Message] | None:
    """Return the message type that the header's first bytes name, or None. Cheap, for routing."""
    found = _BEGINNING.match(frames[1]) if len(frames) > 1 else None
    return MESSAGES.get(found[1].decode()) if found else None


def named_type(frames: Sequence[bytes]) -> type[Message] | None:
    """Return the message type that a header names, or None.

    It also works for a message that cannot be decoded for another reason, such as its version.
    """
    try:
        name = _parsed_header(frames).get("type")
    except ProtocolError:
        return type_of(frames)
    return MESSAGES.get(name) if isinstance(name, str) else None


def in_version_of(asked: Sequence[bytes], answer: Frames) -> Frames:
    """Return the frames of an answer under the protocol version of the request.

    A peer of another version can then read it. Use it for messages that are the same in all versions.
    """
    try:
        version = _parsed_header(asked).get("v")
    except ProtocolError:
        return answer
    if type(version) is not int or OLDEST_VERSION <= version <= PROTOCOL_VERSION:
        return answer
    return [answer[0], orjson.dumps({**orjson.loads(answer[1]), "v": version}), *answer[2:]]


def decode_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the header without its version, which is checked.

    Raises ProtocolError for a malformed header.
    """
    return _readable_header(frames)[1]


def _readable_header(frames: Sequence[bytes]) -> tuple[int, dict[str, Any]]:
    """Return the version of a header, and its other fields."""
    header = _parsed_header(frames)
    version = header.pop("v", None)
    if type(version) is not int or not OLDEST_VERSION <= version <= PROTOCOL_VERSION:
        raise ProtocolError(refusal_of(version))
    if not isinstance(header.get("type"), str):
        raise ProtocolError("the header names no message type")
    return version, header


def _parsed_header(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return a header of any version, with its version.

    Raises ProtocolError for frames that are malformed in every version.
    """
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames; a message has 2 to {MAX_FRAMES}")
    if len(frames[0]) != 8 or frames[0][7] > 127:
        raise ProtocolError("the first frame is not an 8-byte key below 2**63")
    if len(frames[1]) > MAX_HEADER:
        raise ProtocolError(f"the header has {len(frames[1])} bytes; at most {MAX_HEADER} are allowed")
    try:
        header = orjson.loads(frames[1])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError("the header is not a JSON object")
    return header


def _scalars(cls: type[Message], layout: Layout, header: dict[str, Any], version: int) -> dict[str, Any]:
    """Check the header's fields against those of the message type in this version, and return them."""
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
    if version < PROTOCOL_VERSION and version < (least := layout.version(header)):
        raise ProtocolError(f"{cls.TYPE} of version {version} has a field of version {least}")
    return header


def _add_arrays(
    values: dict[str, Any], cls: type[Message], layout: Layout, frames: Sequence[bytes], version: int
) -> None:
    """Add the arrays in frames 2 and up. Missing arrays at the end are empty."""
    most = layout.num_arrays[version]
    if len(frames) - 2 > most:
        raise ProtocolError(f"{cls.TYPE} has {most} arrays, not {len(frames) - 2}")
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


def _check_elements(cls: type[Message], array: ArrayLayout, found: np.ndarray[Any, Any]) -> None:
    if array.bound.admits is None or not array.bound.admits(found):
        raise ProtocolError(f"{cls.TYPE}.{array.name} must hold {array.bound.allowed}")


def _sizes(array: ArrayLayout) -> str:
    return f"it has {array.itemsize} for each element, and at most {array.most_bytes}"


for _cls in MESSAGES.values():
    layout_of(_cls)  # an unbounded field raises when this module is loaded
_BEGINNING = re.compile(rb'\{"v":(?:%d|%d),"type":"([a-z_]+)"' % (OLDEST_VERSION, PROTOCOL_VERSION))


# --- how large a job may be ---------------------------------------------------------------------------------------

_REPEATED = ("params", "speculation", "label")  # the parts of a Submit that derived messages repeat
_WIDEST = {int: -MAX_INT64, bool: False, str: "\U0001f40d" * NAME.most}  # no name has more than 4 bytes a character


def _most_added(cls: type[Message]) -> int:
    """Return the most bytes that a header of this type adds to its copy of a Submit's fields."""
    hints = typing.get_type_hints(cls)
    own = {name: _WIDEST[hints[name]] for name in layout_of(cls).checks if name not in _REPEATED}
    return len(orjson.dumps({"v": PROTOCOL_VERSION, "type": cls.TYPE, **own}))


# The receivers of the broker's derived messages must be able to read them. So a client's header has a lower limit than
# a broker's.
MAX_SUBMIT_HEADER = MAX_HEADER - max(_most_added(cls) for cls in (Open, Assign, JobInfo))


def too_large(job: Submit) -> JobError | None:
    """Return why a job would not fit into the messages that repeat it, or None.

    The size counts as this side encodes it.
    """
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

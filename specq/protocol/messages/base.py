"""The base of all messages, and the types of their fields, each with its bound.

Rule: a field's annotation names its bound in `specq.protocol.bounds`. `specq.protocol.wire` refuses values outside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

import numpy as np

from specq.protocol import bounds
from specq.protocol.arrays import Float16Array, Float32Array, Int32Array, Int64Array, UInt8Array, UInt16Array
from specq.protocol.errors import ProtocolError
from specq.protocol.versions import OLDEST_VERSION

# Array annotations carry the dtype on the wire (little-endian), the number of dimensions and the bound of the elements.
Tokens32 = Annotated[Int32Array, "<i4", 1, bounds.TOKEN_IDS]
NodeTokens = Annotated[Int32Array, "<i4", 1, bounds.NODE_TOKENS]
NodeIds = Annotated[Int32Array, "<i4", 1, bounds.NODE_NAMES]
NodeParents = Annotated[Int32Array, "<i4", 1, bounds.NODE_PARENTS]
NodeDistributions = Annotated[Int32Array, "<i4", 1, bounds.NODE_DISTRIBUTIONS]
NodeScores = Annotated[Float16Array, "<f2", 1, bounds.NODE_SCORES]
Scores16 = Annotated[Float16Array, "<f2", 1, bounds.DRAFT_SCORES]
NodeFlags = Annotated[UInt8Array, "<u1", 1, bounds.NODE_FLAGS]
NodeLanes = Annotated[UInt8Array, "<u1", 1, bounds.NODE_LANES]
NodeProbs = Annotated[Float32Array, "<f4", 1, bounds.NODE_PROBS]
Probs = Annotated[Float32Array, "<f4", 1, bounds.PROBABILITIES]
References = Annotated[Int32Array, "<i4", 1, bounds.REFERENCES]
Weights = Annotated[UInt16Array, "<u2", 1, bounds.WEIGHTS]
Ids = Annotated[Int64Array, "<i8", 1, bounds.IDS]
Lengths = Annotated[Int32Array, "<i4", 1, bounds.LENGTHS]
Origins = Annotated[UInt8Array, "<u1", 1, bounds.ORIGIN_BYTES]
Flags = Annotated[UInt8Array, "<u1", 1, bounds.FLAGS]
Bytes = Annotated[UInt8Array, "<u1", 1, bounds.BYTES]
ActivationBytes = Annotated[UInt8Array, "<u1", 1, bounds.ACTIVATIONS]
PromptRows = Annotated[UInt8Array, "<u1", 1, bounds.PROMPT_ROWS]
Scales = Annotated[Float32Array, "<f4", 1, bounds.SCALES]
Logprobs32 = Annotated[Float32Array, "<f4", 1, bounds.LOGPROBS]

TraceKinds = Annotated[UInt8Array, "<u1", 1, bounds.TRACE_KINDS]
TraceTimes = Annotated[Int64Array, "<i8", 1, bounds.TRACE_TIMES]
TraceValues = Annotated[Int32Array, "<i4", 1, bounds.TRACE_VALUES]

Id = Annotated[int, bounds.ID]
ClockUs = Annotated[int, bounds.CLOCK_US]
Count = Annotated[int, bounds.COUNT]
Lane = Annotated[int, bounds.LANE]
TapLayers = Annotated[tuple[int, ...], bounds.TAP_LAYERS]
TapForm = Annotated[str, bounds.TAP_FORM]
TapWindow = Annotated[int, bounds.TAP_WINDOW]
Name = Annotated[str, bounds.NAME]
Reason = Annotated[str, bounds.REASON]
Addresses = Annotated[tuple[str, ...], bounds.ADDRESSES]
Capabilities = Annotated[tuple[str, ...], bounds.CAPABILITIES]


def empty(dtype: str, version: int = OLDEST_VERSION) -> Any:
    """Return a field whose default is an empty array. It exists since this version."""
    array = np.zeros(0, dtype)
    array.flags.writeable = False
    return field(default_factory=lambda: array, metadata={"since": version})


def _equal(left: Any, right: Any) -> bool:
    return bool(np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Base of all messages. `TYPE` is the name in the header. Messages with equal fields and arrays are equal."""

    TYPE: ClassVar[str] = ""
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WithReason(Message):
    """Base of the messages with a reason for a failure.

    A reason that is too long is clipped, so that the message arrives.
    """

    reason: Reason

    def __post_init__(self) -> None:
        if len(self.reason) > bounds.REASON.most:
            object.__setattr__(self, "reason", self.reason[: bounds.REASON.most - 3] + "...")


def check_sizes(message: Message, sizes: Iterable[tuple[int, Iterable[str]]]) -> None:
    """Check that the named arrays have the given sizes.

    Raises ProtocolError with the first array of a wrong size.
    """
    for wanted, names in sizes:
        for name in names:
            if (size := getattr(message, name).size) != wanted:
                raise ProtocolError(
                    f"the arrays of {message.TYPE} do not fit together: {name} has {size} elements, not {wanted}"
                )

"""Hidden states of a target on their way to a drafter: the request, and rows of numbers as bytes.

- bf16: two bytes per number, rounded to nearest.
- int8: one byte per number. Each layer of a row has a scale, which is its largest magnitude / 127.

Rule: unpacked numbers are finite, else ProtocolError is raised. Only NumPy is needed, so neither side needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specq.protocol.arrays import Float32Array, UInt8Array, UInt16Array
from specq.protocol.errors import ProtocolError

BF16, INT8 = "bf16", "int8"
MOST_ACTIVATION_BYTES = 1 << 20  # bytes of rows in one message
_LARGEST = 127


@dataclass(frozen=True, slots=True)
class ActivationRequest:
    """Hidden states that a drafter reads of its sessions' texts.

    - `layers`: of the target, as in `Tap`. A row holds their numbers side by side. (): none.
    - `form`: the wire form, BF16 or INT8.
    - `window`: number of latest rows to send of prompts and of what was computed before the request.
    """

    layers: tuple[int, ...] = ()
    form: str = BF16
    window: int = 0


NO_ACTIVATIONS = ActivationRequest()


def row_bytes(width: int, form: str, num_layers: int) -> int:
    """Return the number of bytes of a row of `width` numbers."""
    return 2 * width if form == BF16 else width + 4 * num_layers


def to_bf16(values: Float32Array) -> UInt16Array:
    """Round numbers f32[...] to nearest, ties to even, and return their upper halves."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    found: UInt16Array = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return found


def from_bf16(halves: UInt16Array) -> Float32Array:
    """Return the numbers f32[...] that have these upper halves."""
    found: Float32Array = (halves.astype(np.uint32) << 16).view(np.float32)
    return found


def pack_activations(halves: UInt16Array, form: str, num_layers: int) -> tuple[UInt8Array, Float32Array]:
    """Return bfloat16 rows u16[n, width] as bytes u8[...], and scales f32[n * num_layers].

    BF16 has no scales.
    """
    if form == BF16:
        return halves.astype("<u2").reshape(-1).view(np.uint8), np.zeros(0, np.float32)
    values = from_bf16(halves).reshape(len(halves), num_layers, halves.shape[1] // num_layers)
    scales = np.abs(values).max(-1) / _LARGEST
    steps = np.rint(values / np.maximum(scales, np.finfo(np.float32).tiny)[..., None])
    return steps.astype(np.int8).reshape(-1).view(np.uint8), scales.reshape(-1)


def unpack_activations(data: UInt8Array, scales: Float32Array, form: str, width: int, num_layers: int) -> Float32Array:
    """Return rows f32[n, width].

    Raises ProtocolError if the sizes do not fit together, or if a number is not finite.
    """
    size = width * (2 if form == BF16 else 1)
    if not 0 < num_layers <= width or width % num_layers or len(data) % size:
        raise ProtocolError(
            f"activations: {len(data)} bytes are not rows of {width} numbers of {num_layers} layers, {size} bytes each"
        )
    num_rows = len(data) // size
    wanted = 0 if form == BF16 else num_rows * num_layers
    if len(scales) != wanted:
        raise ProtocolError(f"activations: {len(scales)} scales, and {num_rows} rows in {form} have {wanted}")
    if form == BF16:
        rows = from_bf16(data.view("<u2")).reshape(num_rows, width)
    else:
        steps = data.view(np.int8).reshape(num_rows, num_layers, width // num_layers).astype(np.float32)
        with np.errstate(over="ignore"):
            rows = (steps * scales.reshape(num_rows, num_layers, 1)).reshape(num_rows, width)
    if not np.isfinite(rows).all():
        raise ProtocolError("activations: numbers that are not finite")
    return rows

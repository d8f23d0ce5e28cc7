"""Hidden states as bytes: what comes out is what went in, as near as the form allows, or the reason why not."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol import (
    BF16,
    INT8,
    Activations,
    ProtocolError,
    decode,
    encode,
    pack_activations,
    row_bytes,
    to_bf16,
)
from specq.protocol.activations import from_bf16, unpack_activations
from tests.each import each


def test_bfloat16_is_torchs_own() -> None:
    """Rounded to the nearest, ties to even; zeros, the smallest and the largest numbers, and what is not finite
    included."""
    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [rng.integers(0, 2**32, 100_000, np.uint64), [0, 1 << 31, 0x3F808000, 0x3F818000, 0x7F800000]]
    )
    values = bits.astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    theirs = torch.from_numpy(values.copy()).bfloat16()
    np.testing.assert_array_equal(to_bf16(values), theirs.view(torch.int16).numpy().view(np.uint16))
    np.testing.assert_array_equal(from_bf16(to_bf16(values)), theirs.float().numpy())


@each(("form", "num_rows"), product([BF16, INT8], [0, 1, 7]))
def test_rows_survive_the_wire(form: str, num_rows: int) -> None:
    """In bf16 exactly; in int8 within half a step of each layer of each row. A layer of zeros stays one."""
    values = np.random.default_rng(1).normal(0, 1, (num_rows, 3, 16)).astype(np.float32)
    values *= np.array([1e-3, 1, 1e4], np.float32)[:, None]
    values[:1, 1] = 0
    halves = to_bf16(values.reshape(num_rows, 48))
    data, scales = pack_activations(halves, form, 3)
    sent = Activations(
        session_id=1, epoch=2, lane=3, first=4, tap_layers=(0, 5, 9), tap_form=form, width=48, data=data, scales=scales
    )
    received = decode(encode(sent))
    assert received == sent
    assert isinstance(received, Activations)
    found, exact = received.rows().reshape(-1, 3, 16), from_bf16(halves).reshape(-1, 3, 16)
    step = 0 if form == BF16 else np.abs(exact).max(-1, keepdims=True) / 127
    assert np.all(np.abs(found - exact) <= step * 0.501)
    assert len(data) + scales.nbytes == num_rows * row_bytes(48, form, 3)


@given(
    data=st.binary(max_size=200),
    scales=st.lists(st.floats(0, 2.0**127, width=32), max_size=20),
    form=st.sampled_from([BF16, INT8]),
    width=st.integers(0, 40),
    num_layers=st.integers(0, 5),
)
def test_any_message_is_parsed_as_rows_or_refused(
    data: bytes, scales: list[float], form: str, width: int, num_layers: int
) -> None:
    numbers = np.frombuffer(data, np.uint8), np.array(scales, np.float32)
    try:
        rows = unpack_activations(*numbers, form, width, num_layers)
    except ProtocolError:
        return
    assert rows.shape == (len(data) // (width * (2 if form == BF16 else 1)), width)
    assert np.isfinite(rows).all()

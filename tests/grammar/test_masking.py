"""Masks on logits: the C kernel, NumPy, torch and the Triton kernel give the same."""

from __future__ import annotations

from copy import copy
from itertools import product

import numpy as np
import pytest
import torch

from specq.protocol import SamplingParams, SessionStep, Tree
from specq.verification import MaskedSteps, ReadyTokenMasks, StepBatch, TokenMasks, cuda_rows
from specq.verification.masking import mask, mask_rows
from specq.verification.packing import place
from tests.devices import NEEDS_CUDA, NEEDS_INTERPRETER
from tests.each import each

VOCABS = 1, 31, 32, 33, 353, 1100
NUM_ROWS, ROWS = 7, np.array([0, 2, 5, 6])


def random_masks(vocab: int, *, more_words: int = 0) -> np.ndarray:
    """Return masks of some rows: at random, of everything, of nothing, of the last token."""
    rng = np.random.default_rng(vocab)
    bits = rng.random((len(ROWS), 32 * (-(-vocab // 32) + more_words))) < 0.5
    bits[1:] = False
    bits[1], bits[3, vocab - 1] = True, True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def expected(logits: torch.Tensor, words: np.ndarray) -> torch.Tensor:
    """Return what masks make of logits, one by one."""
    found = logits.clone()
    for row, own in zip(ROWS.tolist(), words.view(np.uint32).tolist(), strict=True):
        found[row, [t for t in range(logits.shape[1]) if not own[t >> 5] >> (t & 31) & 1]] = -torch.inf
    return found


def logits_of(vocab: int, *, dtype: torch.dtype = torch.float32, layout: str = "plain") -> torch.Tensor:
    """Return logits [NUM_ROWS, vocab] on the CPU, whose rows or columns may be apart."""
    rng = torch.Generator().manual_seed(vocab)
    wide = torch.randn(NUM_ROWS, 2 * vocab + 3, generator=rng, dtype=torch.float32).to(dtype)
    views = {"plain": wide[:, :vocab].clone(), "wide rows": wide[:, :vocab], "wide columns": wide[:, : 2 * vocab : 2]}
    return views[layout]


@pytest.mark.usefixtures("way")
@each(
    ("vocab", "dtype", "layout"),
    product(VOCABS, [torch.float32, torch.bfloat16, torch.float64], ["plain", "wide rows", "wide columns"]),
)
def test_forbidden_tokens_become_impossible(vocab: int, dtype: torch.dtype, layout: str) -> None:
    """In place, in their rows, and nothing else changes, whatever the type and layout."""
    for more_words in (0, 2):
        logits, words = logits_of(vocab, dtype=dtype, layout=layout), random_masks(vocab, more_words=more_words)
        wanted = expected(logits, words)
        mask_rows(logits, ROWS, words)
        assert torch.equal(logits, wanted)


@pytest.mark.usefixtures("way")
@each("layout", ["plain", "wide columns"])
def test_columns_behind_the_masks_are_forbidden(layout: str) -> None:
    """An engine's logits may have more columns than the masks have tokens."""
    logits = logits_of(353, layout=layout)
    mask_rows(logits, ROWS, random_masks(32))
    assert torch.isinf(logits[ROWS, 32:]).all()
    assert torch.isfinite(logits[1]).all()


def test_logits_of_inference_mode_are_masked() -> None:
    with torch.inference_mode():
        logits = torch.zeros(1, 32)
    step = SessionStep(1, 3, np.array([1], np.int32), SamplingParams(grammar='{"regex":"a"}'))
    batch = StepBatch.of([step])
    batch.masks = ReadyTokenMasks({1: np.array([[4]], np.int32)}, {})
    mask(place(batch), logits)
    assert torch.isfinite(logits[0]).nonzero().ravel().tolist() == [2]


class OfSome(TokenMasks):
    """Masks of each session with an odd number: row r allows the token 10 * session + r."""

    def of(self, judged: StepBatch) -> MaskedSteps:
        found = {}
        for i, (session_id, step) in enumerate(zip(judged.session_ids, judged, strict=True)):
            if session_id % 2:
                bits = np.eye(64, dtype=np.uint8)[[10 * session_id + row for row in range(1 + step.tree.num_nodes)]]
                found[i] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return MaskedSteps.of(found)


def test_each_session_has_its_own_rows() -> None:
    """Whichever steps are judged, and in whichever halves."""
    steps = [
        SessionStep(
            i,
            3,
            np.array([1], np.int32),
            SamplingParams(),
            Tree(*np.zeros((2, i % 3), np.int32) - 1, np.zeros(i % 3, np.float32)),
            i != 2,
        )
        for i in range(6)
    ]
    batch = StepBatch.of(steps)
    batch.masks, ready = OfSome(), copy(batch)
    ready.masks = batch.masks.ready(batch.judged())
    for judged in (batch.judged(), batch.judged()[2:], batch.judged()[:1], ready.judged()):
        placed = place(judged)
        logits = torch.zeros(placed.num_rows, 64)
        mask(placed, logits)
        wanted = [
            10 * step.session_id + row if step.session_id % 2 else -1
            for step in judged
            for row in range(1 + step.tree.num_nodes)
        ]
        found = [own.isfinite().nonzero().ravel().tolist() for own in logits]
        assert [own[0] if len(own) == 1 else -1 for own in found] == wanted


def check_kernel(device: str, vocab: int, dtype: torch.dtype, layout: str) -> None:
    logits, words = logits_of(vocab, dtype=dtype, layout=layout), random_masks(vocab)
    wanted = expected(logits, words)
    on_device = logits.to(device)
    if layout == "wide rows":  # `to` makes rows contiguous
        on_device = torch.zeros(NUM_ROWS, vocab + 5, dtype=dtype, device=device)[:, :vocab].copy_(logits)
    cuda_rows.mask_rows(on_device, ROWS, words)
    assert torch.equal(on_device.cpu(), wanted)


KERNEL_CASES = list(product(VOCABS[1:], [torch.float32, torch.bfloat16], ["plain", "wide rows"]))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@each(("vocab", "dtype", "layout"), [*KERNEL_CASES, (151_936, torch.bfloat16, "wide rows")])
def test_the_kernel_on_a_gpu(device: str, vocab: int, dtype: torch.dtype, layout: str) -> None:
    assert cuda_rows.is_available()
    check_kernel(device, vocab, dtype, layout)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=NEEDS_INTERPRETER)])
@each(("vocab", "dtype", "layout"), KERNEL_CASES)
def test_the_kernel_in_the_interpreter(
    device: str, vocab: int, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_rows, "MASK_BLOCK", 32)
    check_kernel(device, vocab, dtype, layout)

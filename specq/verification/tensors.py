"""What the judge computes with tensors on any device: distributions, temporary changes of logits, masks of grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from specq.protocol import Int32Array, Int64Array, IntpArray, SamplingParams
from specq.verification import cuda_rows, torch_rows
from specq.verification.devices import target_rows
from specq.verification.host_kernels import CUT, GREEDY, Rows, by_kind, make_rows
from specq.verification.host_logits import Logits, Places
from specq.verification.transfers import to_device

NO_NODES = np.zeros(0, np.int64)


def perturbed_scores(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    token_ids: Int32Array | None = None,
) -> torch.Tensor:
    """See `specq.verification.sampling`."""
    parts = []
    for kind, which, own in by_kind(make_rows(params, positions)):
        rows = logits if len(which) == len(logits) else logits[torch.from_numpy(which).to(logits.device)]
        parts.append((which, rows if kind == GREEDY else _noisy(rows, own, token_ids, is_cut=kind == CUT)))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([which for which, _ in parts]))
    return torch.cat([scores.float() for _, scores in parts])[torch.from_numpy(order).to(logits.device)]


def target_probs(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """See `specq.verification.sampling`."""
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    target = target_rows(logits)
    for kind, which, own in by_kind(make_rows(params, [0] * len(params))):
        at = torch.from_numpy(which).to(logits.device)
        if kind == GREEDY:
            tokens = torch.from_numpy(target.own_tokens(own)()).to(logits.device)
            probs[at, tokens.long()] = 1
            continue
        distributions, _ = target.distributions(own)(NO_NODES, NO_NODES[:, None])
        _, bounds, masses, _ = torch.from_numpy(distributions.found).to(logits.device).T[..., None]
        scaled = torch_rows.scale(logits[at], own)
        probs[at] = torch.where(scaled >= bounds, scaled.double().exp() / masses, 0)
    return probs


def _noisy(logits: torch.Tensor, rows: Rows, token_ids: Int32Array | None, *, is_cut: bool) -> torch.Tensor:
    """Return f32[rows, vocab] of rows with T > 0: scaled logits plus noise, -inf if they are cut."""
    scaled = torch_rows.scale(logits, rows)
    if not is_cut:
        return torch_rows.add_noise(scaled, rows, token_ids)
    own = rows.copy()
    own["logit_row"] = np.arange(len(rows))
    distributions, _ = target_rows(logits).distributions(own)(NO_NODES, NO_NODES[:, None])
    bounds = torch.from_numpy(distributions.found[:, 1:2].astype(np.float32)).to(logits.device)
    scaled.masked_fill_(scaled < bounds, -torch.inf)
    return torch_rows.add_noise(scaled, rows, token_ids)


class TensorEdits:
    """The same as `HostEdits` for tensors. If the type or the layout does not fit, a copy is changed."""

    def __init__(self, logits: torch.Tensor) -> None:
        num_rows, vocab = logits.shape
        is_plain = logits.dtype == torch.float32 and logits.stride(-1) == 1 and logits.stride(0) >= vocab
        own = logits if is_plain else logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self.logits: Logits = own
        self._rows_of, self.stride, self.vocab = own, own.stride(0), vocab
        self._flat = own.as_strided(((num_rows - 1) * self.stride + vocab,), (1,))
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """See `HostEdits`."""
        return to_device(array, self._rows_of.device)

    @torch.inference_mode()  # the logits may be inference tensors
    def change(self, places: Places, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See `HostEdits`."""
        if not len(places):
            return
        index = self.put(places)
        before = self._flat.index_select(0, index)
        self._before.append((index, before))
        self._flat.scatter_(0, index, how(before))

    @torch.inference_mode()
    def keep(self, rows: slice, token_ids: IntpArray) -> None:
        """See `HostEdits`."""
        own, kept = self._rows_of[rows], self.put(token_ids)
        before = own.clone()
        self._whole.append((own, before))
        own[:] = -torch.inf
        own.index_copy_(1, kept, before.index_select(1, kept))

    @torch.inference_mode()
    def restore(self) -> None:
        """See `HostEdits`."""
        while self._before:
            self._flat.scatter_(0, *self._before.pop())
        while self._whole:
            own, before = self._whole.pop()
            own.copy_(before)


@torch.inference_mode()  # the logits may be inference tensors
def mask_tensor(logits: torch.Tensor, rows: Int64Array, words: Int32Array) -> None:
    """See `specq.verification.masking.mask_rows`. This starts the work and does not wait."""
    if logits.is_cuda and logits.stride(-1) == 1 and cuda_rows.is_available():
        cuda_rows.mask_rows(logits, rows, words)
        return
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    index = to_device(rows, logits.device)
    is_forbidden = to_device(bits == 0, logits.device)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill(is_forbidden, -torch.inf))

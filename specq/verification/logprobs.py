"""Log-probabilities for users: of the target's plain logits, before temperature, bias, penalties and cuts, which is
what OpenAI's API and vLLM's default report."""

from __future__ import annotations

import numpy as np
import torch

from specq.protocol import Float32Array, Int32Array, Logprobs
from specq.verification.transfers import Fetched, to_device


class BegunLogprobs:
    """Log-probabilities of emitted tokens i64[m] and of the `num_top` likeliest, on their way to the host; logits [m,
    vocab]."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        logits = logits.float()
        norm = logits.logsumexp(-1, keepdim=True)
        top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        own = logits.gather(1, token_ids[:, None])
        self._values = Fetched(torch.cat((own, top), 1) - norm)
        self._top_ids = Fetched(top_ids.to(torch.int32))

    def wait(self) -> tuple[Float32Array, Int32Array]:
        """Return f32[m, 1 + num_top], of the emitted tokens first, and the ids of the others, i32[m, num_top]."""
        return self._values.wait(), self._top_ids.wait()


def logprobs(logits: torch.Tensor, token_ids: Int32Array, num_top: int) -> Logprobs:
    """Return the log-probabilities of emitted tokens i32[m] and of the num_top likeliest; logits [m, vocab]."""
    index = to_device(token_ids.astype(np.int64), logits.device)
    values, top_ids = BegunLogprobs(logits, index, num_top).wait()
    return Logprobs(tokens=values[:, 0].copy(), top_ids=top_ids.copy(), top=values[:, 1:].copy())

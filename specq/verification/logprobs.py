"""Log-probabilities for users: of the target's plain logits, before temperature, bias, penalties and cuts, which is what
OpenAI's API and vLLM's default report."""

from __future__ import annotations

import numpy as np
import torch

from specq.protocol import Int32Array, Logprobs


def logprobs(logits: torch.Tensor, token_ids: Int32Array, num_top: int) -> Logprobs:
    """Return the log-probabilities of emitted tokens i32[m] and of the num_top likeliest; logits [m, vocab]."""
    logits = logits.float()
    index = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)[:, None]
    norm = logits.logsumexp(-1, keepdim=True)
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    return Logprobs(
        tokens=(logits.gather(1, index) - norm)[:, 0].cpu().numpy(),
        top_ids=top_ids.to(torch.int32).cpu().numpy(),
        top=(top - norm).cpu().numpy(),
    )

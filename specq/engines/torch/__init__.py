"""The parts of the torch engine, one task per file.

- loading: a checkpoint -> `ModelInfo` and a forward.
- gguf_network: a GGUF file -> a transformers model.
- integer: a GGUF file -> a forward in integer arithmetic.
- draft_network: a draft model in specq's form -> a transformers model with a smaller head.
- generic: forward through transformers' own modelling code, on every device and architecture.
- native: the compiled CPU forward (`specq.engines.native`) for Llama-like float32 models.
- cuda/: forward by Triton kernels and CUDA graphs on a GPU; draft chains; recorded work.
- forward: what the forwards share: KV tensors, results, requested hidden states.
- top: the best tokens of each row, for drafters.
- row_noise: the noise of rows, from keys.

`specq.engines.native` has the parts without torch: rows, the KV pool, the compiled forward. All forwards take
`PackedRows`. Their KV tensors have one shape, [num_layers, num_kv_heads, num_slots, head_dim]. The engine and the
draft-model proposer use any forward in the same way.
"""

from specq.engines.native import (
    ALONE,
    ChainStarts,
    KvPool,
    PackedRows,
    RowPacker,
    Threads,
    pack_nodes,
    pack_tokens,
)
from specq.engines.torch.cuda.replays import BATCH_SIZES, Inbox, Replays, fetch, padded_batch
from specq.engines.torch.forward import ForwardOutput
from specq.engines.torch.loading import LoadedModel, chain_drafter, load, load_network, pick_device
from specq.engines.torch.native import threads_of
from specq.engines.torch.row_noise import RowNoise, Sampling, noise_of
from specq.engines.torch.top import rank_rows, rank_tokens

__all__ = [
    "ALONE",
    "BATCH_SIZES",
    "ChainStarts",
    "ForwardOutput",
    "Inbox",
    "KvPool",
    "LoadedModel",
    "PackedRows",
    "Replays",
    "RowNoise",
    "RowPacker",
    "Sampling",
    "Threads",
    "chain_drafter",
    "fetch",
    "load",
    "load_network",
    "noise_of",
    "pack_nodes",
    "pack_tokens",
    "padded_batch",
    "pick_device",
    "rank_rows",
    "rank_tokens",
    "threads_of",
]

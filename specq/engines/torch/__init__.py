"""The parts of the torch engine, one task per file.

- loading: a checkpoint -> `ModelInfo` and a forward.
- gguf_network: a GGUF file -> a transformers model.
- integer: a GGUF file -> a forward in integer arithmetic.
- draft_network: a draft model in specq's form -> a transformers model with a smaller head.
- generic: forward through transformers' own modelling code, on every device and architecture.
- native: the compiled CPU forward (`specq.engines.native`) for Llama-like float32 models of transformers.
- cuda/: forward by Triton kernels and CUDA graphs on a GPU; draft chains; recorded work.
- engine: what the engine adds to `specq.engines.native.steps`.
- forward: what the forwards of torch share: KV tensors, tokens that only the device knows.
- top: the best tokens of each row, for drafters on a device.
- row_noise: the noise of rows, from keys.

`specq.engines.native` has the parts without torch: rows, the KV pool, the compiled forward. All forwards take
`PackedRows`. Their KV tensors have one shape, [num_layers, num_kv_heads, num_slots, head_dim]. The engine and the
draft-model proposer use any forward in the same way.
"""

from specq.engines.torch.cuda.replays import BATCH_SIZES, Replays, fetch, padded_batch
from specq.engines.torch.loading import load, load_network, pick_device, runs_triton
from specq.engines.torch.row_noise import RowNoise, Sampling, noise_of
from specq.engines.torch.top import rank_rows

__all__ = [
    "BATCH_SIZES",
    "Replays",
    "RowNoise",
    "Sampling",
    "fetch",
    "load",
    "load_network",
    "noise_of",
    "padded_batch",
    "pick_device",
    "rank_rows",
    "runs_triton",
]

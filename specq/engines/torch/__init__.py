"""The torch engine's parts, one job a file.

    kv_pool       which slot holds whose token: sessions, prefix sharing, eviction; no torch
    rows          the packed rows of one forward pass, as plain integer arrays; no torch
    loading       a checkpoint -> `ModelInfo` and a forward
    gguf_network  a GGUF file -> a transformers model
    draft_network a draft model of our own form -> a transformers model with a smaller head
    generic       forward through transformers' own modelling code; every device and architecture
    native        forward in one C call (kernels/); Llama-like float32 models on a CPU
    native_chain  chains of draft tokens in one C call; chain: the same on a GPU
    fused         forward through Triton kernels and CUDA graphs, on a GPU (fused_*, attention_plan, gpu_kernels/)
    forward       what the forwards share: KV tensors, results, hidden states that are asked for
    top           the best tokens of each row, for drafters; row_noise: the noise of rows, from keys
    inbox         numbers to a device and back; replays: work of fixed shapes, recorded as CUDA graphs
    compiler      builds kernels/ at first use

All forwards take `PackedRows` and keep KV in tensors of one shape, [num_layers, num_kv_heads, num_slots, head_dim]; the
engine and the draft-model proposer use any without knowing which.
"""

from specq.engines.torch.forward import ForwardOutput
from specq.engines.torch.inbox import Inbox, fetch
from specq.engines.torch.kv_pool import KvPool
from specq.engines.torch.loading import LoadedModel, chain_drafter, load, load_network, pick_device
from specq.engines.torch.native import ALONE, Threads
from specq.engines.torch.replays import BATCH_SIZES, Replays, padded_batch
from specq.engines.torch.row_noise import RowNoise, Sampling, noise_of
from specq.engines.torch.rows import ChainStarts, PackedRows, RowPacker, pack_nodes, pack_tokens
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
]

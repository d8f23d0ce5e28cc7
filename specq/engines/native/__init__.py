"""The compiled forward pass on a CPU and its parts. No module here imports torch: arrays in, arrays out.

- forward: a Llama-like decoder's forward pass in one C call (kernels/).
- chains: chains of draft tokens in one call.
- weights: the weights of such a decoder, and their layout in the kernels.
- loading: a GGUF file or a draft model of our own form -> `LoadedModel` (loaded), by gguf, draft_weights, decoder and
  rotary.
- block_cache: the file with a GGUF file's repacked blocks, for integer arithmetic. panels: matrices in such blocks.
- engine, steps, flights: the engine. `PooledEngine` in steps is the part that the torch engine shares.
- sharing: whether a pass is shared with helper threads.
- rows: the packed rows of one forward pass, as plain integer arrays.
- kv_pool: which slot holds which token: sessions, prefix sharing, eviction.
- pass_times: the expected seconds of a pass, before any has run.
- slot_tables: the tables of the pool's sessions.
- top: the best tokens of each row, for drafters.
- compiler: builds kernels/ at first use.
"""

from specq.engines.arithmetic import AUTO, EXACT, INTEGER, ROUNDED
from specq.engines.native.block_cache import has_block_cache
from specq.engines.native.chains import NativeChainDrafter
from specq.engines.native.compiler import kernels
from specq.engines.native.forward import ALONE, NativeForward, NativeOutput, Threads
from specq.engines.native.gguf import integer_weights, rounded
from specq.engines.native.kv_pool import KvPool
from specq.engines.native.loaded import ForwardOutput, HostForward, LoadedModel
from specq.engines.native.loading import load, threads_of
from specq.engines.native.pass_times import PassWork
from specq.engines.native.rotary import inverse_frequencies, rope_tables
from specq.engines.native.rows import ChainStarts, PackedRows, RowPacker, RowTap, pack_nodes, pack_tokens
from specq.engines.native.weights import BlockWeight, DecoderLayer, Linear, NativeWeights

__all__ = [
    "ALONE",
    "AUTO",
    "EXACT",
    "INTEGER",
    "ROUNDED",
    "BlockWeight",
    "ChainStarts",
    "DecoderLayer",
    "ForwardOutput",
    "HostForward",
    "KvPool",
    "Linear",
    "LoadedModel",
    "NativeChainDrafter",
    "NativeForward",
    "NativeOutput",
    "NativeWeights",
    "PackedRows",
    "PassWork",
    "RowPacker",
    "RowTap",
    "Threads",
    "has_block_cache",
    "integer_weights",
    "inverse_frequencies",
    "kernels",
    "load",
    "pack_nodes",
    "pack_tokens",
    "rope_tables",
    "rounded",
    "threads_of",
]

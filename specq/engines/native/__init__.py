"""The compiled forward pass on a CPU, and what it needs: rows of a step, the KV pool, packed weights. No torch.

forward   a Llama-like decoder's forward pass in one C call (kernels/); chains: chains of draft tokens in one call
packing   weights in the layout of the kernels
sharing   whether a pass is shared with helper threads
rows      the packed rows of one forward pass, as plain integer arrays
kv_pool   which slot holds whose token: sessions, prefix sharing, eviction
compiler  builds kernels/ at first use
"""

"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), which reads the target's hidden states and its own.

spec         the entry of the table of drafters
interface    what a verifier needs of a head
drafter      trees for the verifier's sessions, beside the target (`Eagle`)
remote       trees in a draft worker, from hidden states that the verifier sends (`EagleTrees`)
texts, state_cache   what is known of each text, and its keys and values
levels, rows   the nodes of a tree level by level; the passes that compute them
recorded, passes   the same on a GPU, recorded as CUDA graphs
    fused, fused_layer, fused_trees, gpu_kernels   the same by Triton kernels of our own
"""

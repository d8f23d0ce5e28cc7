"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), which reads the target's hidden states and its own.

    source          drafts inside a verifier
    interface       what `source` needs from a head
    grown_trees     its trees, on the device or read by the host
    spec, remote    drafts in a draft worker, from hidden states that the verifier sends (`EagleTrees`)
    form, loading, network   the files of a head -> a network in memory
    drafter         trees for many texts at once (`Eagle`)
    texts           the data of each text, and its keys and values
    levels, rows    the nodes of a tree level by level, and the passes that compute them
    recorded, passes         the same on a GPU, recorded as CUDA graphs
    fused, gpu_kernels       the same by Triton kernels of our own

Rule: `source`, `spec`, `form` and `interface` do not import torch.
"""

"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), which reads the target's hidden states and its own.

    source          drafts inside a verifier (`EagleSource`)
    spec, remote    drafts in a draft worker, from hidden states that the verifier sends (`EagleTrees`)
    form, arrays    the files of a head -> arrays in memory
    mtp_form        an MTP layer inside a target's checkpoint -> the same
    row_head        texts and their rows, in NumPy or torch
    levels          the nodes of a tree, level by level
    host            trees for many texts at once, on a CPU by NumPy (`HostEagle`)
    drafter         the same by torch (`Eagle`)
    loading, network         a head as a network of torch
    rows            the passes that compute rows of texts and trees
    recorded, passes         the same on a GPU, recorded as CUDA graphs
    fused, gpu_kernels       the same by Triton kernels of our own
    parallel        a P-EAGLE head: several tokens in one pass, drafted as a block drafter's (`PEagleHead`)

Rule: the modules above `drafter` do not import torch, but for tensors of it that they are given.
"""

"""Drafting with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), which reads the target's hidden states and its own.

    source          drafts inside a verifier; interface: what it needs of a head; grown_trees: its trees, read by the
                    host or not yet
    spec, remote    drafts in a draft worker, from hidden states that the verifier sends (`EagleTrees`)
    form, loading, network   what the files of a head say and hold -> a network in memory
    drafter         trees for many texts at once (`Eagle`)
    texts           what is known of each text, and its keys and values
    levels, rows    the nodes of a tree level by level, and the passes that compute them
    recorded, passes         the same on a GPU, recorded as CUDA graphs
    fused, gpu_kernels       the same by Triton kernels of our own

Rule: neither `source` nor `spec` nor `form` nor `interface` imports torch.
"""

"""Drafting with a block drafter (DFlash, arXiv 2602.06036): one pass predicts all tokens of a block.

A block is the text's last token, the anchor, and a mask for each token to draft. The masks see each other, the anchor,
and the features of the text before the anchor. Features are hidden states of several of the target's layers, fused by
one matrix. From the predictions of a pass the likeliest prefixes are drafted as a tree (DDTree, arXiv 2604.12989).

    source          drafts inside a verifier (`BlockSource`)
    spec, remote    drafts in a draft worker, from hidden states that the verifier sends (`BlockTrees`)
    form, arrays    the files of a block drafter -> arrays in memory
    network         the same as a network of torch
    drafter         trees for many texts at once (`BlockHead`)
    passes          the passes that compute features of texts and blocks
    fused, gpu_kernels  passes of blocks by Triton kernels
    recorded        passes on a GPU, recorded as CUDA graphs

Rule: `source`, `spec`, `form` and `arrays` do not import torch.
"""

"""Heads that draft whole trees from the hidden states of a target's text: what all kinds of them share.

    interface    what a verifier needs from such a head (`TreeHead`)
    source       drafts inside a verifier (`TreeSource`)
    spec, remote  drafters of draft workers (`FedDrafter`)
    grown_trees  grown trees as drafts, on the device or read by the host
    ranked       trees from predictions of positions that do not depend on each other
    device_trees  the same on a device; trees that the host reads later
    fused_layers, gpu_kernels  layers of heads, and the choice of nodes, by Triton kernels
    texts        which rows of each text a head has computed, and which wait (`TextHead`)
    padding      the shapes of recorded passes
    cache        the keys and values of these rows, in torch

Rule: only `padding`, `cache`, `device_trees`, `fused_layers` and `gpu_kernels` import torch.
"""

"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    source         drafts inside a verifier
    interface      what `source` needs from heads
    form, arrays   the files of heads -> arrays in memory
    network        the same as matrices of torch
    host, drafter  heads on the target's hidden states: on a CPU (`HostMedusa`), and by torch (`Medusa`)
    draft_model    a small target with heads of its own, as a draft model (`MedusaModel`)

Rule: only `network` and `drafter` import torch, and `draft_model` for tensors of it that it is given.
"""

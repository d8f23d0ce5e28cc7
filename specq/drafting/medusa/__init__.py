"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    source         drafts inside a verifier
    interface      what `source` needs from heads
    form, network  the files of heads -> matrices in memory
    drafter        heads on the target's hidden states (`Medusa`)
    draft_model    a small target with heads of its own, as a draft model (`MedusaModel`)

Rule: `source`, `form` and `interface` do not import torch.
"""

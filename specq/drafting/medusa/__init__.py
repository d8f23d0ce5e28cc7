"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    source         drafts inside a verifier; interface: what it needs of heads
    form, network  what the files of heads say and hold -> matrices in memory
    drafter        heads on the target's hidden states (`Medusa`)
    draft_model    a small target with heads of its own, as a draft model (`MedusaModel`)

Rule: neither `source` nor `form` nor `interface` imports torch.
"""

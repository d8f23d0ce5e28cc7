"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

interface    what a verifier needs of heads
drafter      heads on the target's hidden states, in the verifier (`Medusa`)
draft_model  a small target with heads, as a draft model (`MedusaModel`)
"""

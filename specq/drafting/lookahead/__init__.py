"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams that the target gives in rows of its own steps.

    source   the rows and n-grams of one session, and what drafts inside a verifier

In: tokens that the target gave. Out: chains of drafts.
"""

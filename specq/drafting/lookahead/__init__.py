"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams from extra rows in the target's own steps.

    source   the rows and n-grams of one session, and the source inside a verifier

In: tokens from the target. Out: chains of drafts.
"""

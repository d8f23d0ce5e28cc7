"""The decisions of a verifier: which draft sources are used, when the next step begins, and how many rows it has.

They depend on what the verifier learns from its steps (`specq.verifier.models`).
"""

"""The open sessions of a verifier.

This package holds their committed tokens. It selects the sessions for the next step and for room in the engine. It also
attaches drafts to their trees.
"""

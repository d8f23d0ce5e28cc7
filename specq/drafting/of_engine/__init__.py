"""Drafts by a drafter that the engine itself runs within its steps, such as vLLM's.

source   the source inside a verifier
"""

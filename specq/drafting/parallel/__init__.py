"""Drafting with a model that has mask tokens: all tokens of a chain in one pass (`drafter`)."""

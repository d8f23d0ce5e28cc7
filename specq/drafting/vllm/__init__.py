"""Drafting with a draft model in vLLM, in a draft worker (`spec`, `drafter`)."""

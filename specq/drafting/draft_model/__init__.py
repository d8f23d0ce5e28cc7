"""Drafting with a smaller model of the target's family: in a draft worker, or in the verifier's process.

    spec, drafter   drafts trees in a draft worker (`DraftModel`)
    source, making  drafts inside a verifier, in chains (`ChainModel` of chain_model)
    shaped          drafts inside a verifier, in trees of shapes that jobs ask for
    chain_sessions  the sessions for which chains are drafted
    offered_chains  chains as drafts, and their outcomes
    contexts, kv_trees, children    used by all drafters with a model: contexts, trees in its KV cache, logits to
                                    children

Rule: neither `spec` nor `source` imports torch.
"""

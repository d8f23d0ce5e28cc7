"""Drafting with a smaller model of the target's family: in a draft worker, or in the verifier's process.

    spec, drafter   drafts trees in a draft worker (`DraftModel`)
    source, making  drafts inside a verifier, in chains (`ChainModel` of chain_model); shaped: in trees of shapes that
                    jobs ask for
    chain_sessions, offered_chains   the sessions for which chains are drafted; chains as drafts,
    and what became of them round_choice, reading_choice   how deep it drafts; whether chains are verified before the
    host has read them contexts, kv_trees, children    for all that draft with a model: contexts, trees in its KV
    memory, logits to
                                    children

Rule: neither `spec` nor `source` imports torch.
"""

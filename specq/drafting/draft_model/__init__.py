"""Drafting with a smaller model of the target's family: in a draft worker, or in the verifier's process.

    spec, drafter   drafts trees in a draft worker (`DraftModel`)
    source, making  drafts inside a verifier, in chains (`chains`, `ChainModel` of chain_model); shaped: in trees of
                    shapes that jobs ask for
    round_choice    how deep it drafts; offered_chains: what became of chains
    reading_choice, unread_chains   chains that are verified before the host has read them, and whether that pays
    contexts, kv_trees, children    for all that draft with a model: contexts, trees in its KV memory, logits to
                                    children

Rule: neither `spec` nor `source` nor `chains` imports torch.
"""

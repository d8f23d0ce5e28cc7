"""Drafting with a smaller model of the target's family, token by token: in a draft worker, or in the verifier's process.

spec             the entry of the table of drafters
drafter          trees in a draft worker (`DraftModel`)
chain_model      chains for the verifier's many sessions at once (`ChainModel`); interface: what a verifier needs of chains
proposer_chains  such chains from any drafter
profiling        how long a level of chains takes
contexts, kv_trees, children   what all that draft with a model share: contexts, trees in its KV memory, logits to children
"""

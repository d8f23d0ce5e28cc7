"""Whether one model's drafts can be hints for another."""

from __future__ import annotations

from specq.protocol.types import ModelInfo


def fits(draft: ModelInfo, target: ModelInfo) -> bool:
    """Can drafts of one model be hints for the other?"""
    return draft.tokenizer_hash in ("", target.tokenizer_hash)


def mismatch(draft: ModelInfo, targets: list[ModelInfo], shared: str = "") -> str:
    """Return why a draft model fits none of the targets, naming both sides, and what can be done. `shared`: how many
    tokens both have, where that is known."""
    served = ", ".join(f"{t.name} ({t.num_tokens} tokens, tokenizer {t.tokenizer_hash[:12]})" for t in targets)
    return (
        f"draft model {draft.name} ({draft.num_tokens} tokens, tokenizer {draft.tokenizer_hash[:12]}) does not share "
        f"the tokenizer of any target: {served}. Vocabulary, merges and added tokens must be equal, or a way "
        f"chosen by --vocabulary (a draft worker's needs --target): shared drafts only tokens that both have"
        f"{shared and f' ({shared})'}; text turns its drafts into text, and that into tokens of the target"
    )

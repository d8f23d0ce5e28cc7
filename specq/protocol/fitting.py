"""Whether one model's drafts can be hints for another."""

from __future__ import annotations

from specq.protocol.types import ModelInfo


def fits(draft: ModelInfo, target: ModelInfo) -> bool:
    """Can drafts of one model be hints for the other?"""
    return draft.tokenizer_hash in ("", target.tokenizer_hash)


def mismatch(draft: ModelInfo, targets: list[ModelInfo]) -> str:
    """Return why a draft model fits none of the targets, naming both sides."""
    served = ", ".join(f"{t.name} ({t.num_tokens} tokens, tokenizer {t.tokenizer_hash[:12]})" for t in targets)
    return (
        f"draft model {draft.name} ({draft.num_tokens} tokens, tokenizer {draft.tokenizer_hash[:12]}) does not share "
        f"the tokenizer of any target: {served}. Vocabulary, merges and added tokens must be equal"
    )

"""Draft models of another vocabulary than the target's: drafters around a drafter, which speak the target's token
ids.

    same     the draft model has the target's tokenizer; nothing stands around it
    shared   `shared`: token-level intersection; only tokens that both have are drafted, with their distribution
    text     `text`: string-level matching; what was drafted is made text and cut by the target's tokenizer, as point
             masses
    retelling  what both share: the session's text for the draft model, and its KV kept over what stays the same

Rule: whatever is drafted here are ids of the target, and nobody else knows of two vocabularies. To add a way: a class
with the arguments of `SharedVocabulary`, and a line in `VOCABULARIES`, which `specq.config` offers by the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from specq.drafting.interface import Drafter
from specq.drafting.vocabulary.retelling import RetellingDrafter
from specq.protocol import ConfigError, ModelInfo, fits, mismatch
from specq.runtime import resolve
from specq.text import ByteCodec, Vocabularies, num_tokens, tokenizer_hash

log = structlog.get_logger(__name__)

SAME = "same"
VOCABULARIES = {
    "shared": "specq.drafting.vocabulary.shared:SharedVocabulary",
    "text": "specq.drafting.vocabulary.text:TextVocabulary",
}

__all__ = ["SAME", "VOCABULARIES", "RetellingDrafter", "bridge", "in_vocabulary"]


def bridge(
    draft: ModelInfo, way: str, draft_files: dict[str, str], target_files: dict[str, str], target: str
) -> Callable[[Drafter], Drafter]:
    """Return what makes a drafter with such a model one for a target of this name: the drafter itself, where both
    have one tokenizer; else what stands around it.

    draft_files, target_files   as `specq.text.load_tokenizer_files` returns them
    Raises ConfigError where that is refused (`way` is `SAME`) or cannot be done.
    """
    for name, files in ((draft.name, draft_files), (target, target_files)):
        if not files and draft.tokenizer_hash:
            raise ConfigError(
                f"{name} has no tokenizer.json, so its tokens cannot be compared; put it beside its config.json"
            )
    info = _info(draft, target_files, target)
    if fits(draft, info):
        return lambda drafter: drafter
    vocabularies = Vocabularies(ByteCodec(draft_files), ByteCodec(target_files))
    if way == SAME:
        raise ConfigError(mismatch(draft, [info], str(vocabularies.shared)))
    log.info("vocabulary_bridged", way=way, draft=draft.name, target=target, shared=len(vocabularies.shared))
    return lambda drafter: in_vocabulary(drafter, way, vocabularies, info)


def _info(draft: ModelInfo, target_files: dict[str, str], target: str) -> ModelInfo:
    """Return what a tokenizer says of its model."""
    if not draft.tokenizer_hash:
        return draft
    tokenizer = target_files["tokenizer.json"]
    return replace(
        draft, name=target, num_tokens=num_tokens(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer), eos_ids=()
    )


def in_vocabulary(drafter: Drafter, way: str, vocabularies: Vocabularies, target: ModelInfo) -> RetellingDrafter[Any]:
    """Return a drafter for targets with this tokenizer; ConfigError where the two cannot be brought together that way.

    target   of whose fields those that follow from the tokenizer count
    """
    info = replace(
        drafter.info,
        vocab_size=target.num_tokens,
        num_tokens=target.num_tokens,
        eos_ids=target.eos_ids,
        tokenizer_hash=target.tokenizer_hash,
    )
    make: type[RetellingDrafter[Any]] = resolve("vocabulary", VOCABULARIES, way)
    return make(drafter, vocabularies, info)

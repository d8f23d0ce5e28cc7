"""Draft models with another vocabulary than the target's: wrappers that translate to the target's ids.

    same     the draft model has the target's tokenizer, and no wrapper is needed
    shared   `shared`: token-level intersection. Only tokens in both vocabularies are drafted, with their distribution
    text     `text`: string-level matching. Drafts become text, which the target's tokenizer cuts, as point masses
    retelling  what both share: the session's text for the draft model, with KV kept for the unchanged part

Rule: all drafts from here are ids of the target. No other module knows about two vocabularies. To add a way: write a
class with the arguments of `SharedVocabulary`, and add a line to `VOCABULARIES`, which `specq.config` offers by the
same names.
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

__all__ = ["SAME", "RetellingDrafter", "bridge", "in_vocabulary"]


def bridge(
    draft: ModelInfo, way: str, draft_files: dict[str, str], target_files: dict[str, str], target: str
) -> Callable[[Drafter], Drafter]:
    """Return a function that adapts a drafter with this model to a target of this name.

    It returns the drafter itself if both have one tokenizer, else a wrapper.

    draft_files, target_files   as `specq.text.load_tokenizer_files` returns them.

    Raises ConfigError if this is refused (`way` is `SAME`) or impossible.
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
    """Return the model's info with the values of the target's tokenizer."""
    if not draft.tokenizer_hash:
        return draft
    tokenizer = target_files["tokenizer.json"]
    return replace(
        draft, name=target, num_tokens=num_tokens(tokenizer), tokenizer_hash=tokenizer_hash(tokenizer), eos_ids=()
    )


def in_vocabulary(drafter: Drafter, way: str, vocabularies: Vocabularies, target: ModelInfo) -> RetellingDrafter[Any]:
    """Return a drafter for targets with this tokenizer; ConfigError if the two vocabularies cannot be combined so.

    target   only the fields that follow from the tokenizer count.
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

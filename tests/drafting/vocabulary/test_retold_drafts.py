"""Drafts as text: a draft model of another vocabulary drafts text, which is cut as the target would."""

from __future__ import annotations

import numpy as np
import pytest

from specq.drafting import Expansion
from specq.drafting.vocabulary import in_vocabulary
from specq.protocol import EngineError, SamplingParams
from tests.drafting.vocabulary.drafts import (
    BOTH,
    INFO,
    PIECES,
    TEXT,
    TRAINED,
    ScriptedDraft,
    chain,
    directory,
    drafted,
    drafter,
)

__all__ = ["directory", "drafter"]  # fixtures


@pytest.mark.parametrize(
    "text", [" sells the eggs.", " return a + b\n", "naïve", " 中文 🙂🙃", "🙂", "\n\n    return", " <|im_end|> "]
)
def test_text_is_drafted_as_the_target_would_cut_it(text):
    assert TRAINED.decode(drafted(text.encode())) == text.encode()


def test_most_words_are_whole():
    """What the draft model spells letter by letter are the target's own tokens, but for those longer than it waits
    for."""
    text = b" return a + b\n"
    assert len(drafted(text)) < len(PIECES.encode(text))


def test_half_a_character_in_the_context_is_completed():
    smile = "🙂".encode()
    drafter = in_vocabulary(ScriptedDraft(b"a" + smile + b"b"), "text", BOTH, INFO)
    drafter.open(1, np.array(TRAINED.encode(b"a" + smile[:2]), np.int32), SamplingParams())
    assert TRAINED.decode(chain(drafter, 8)[0]) == smile[2:] + b"b"


def test_the_end_of_a_text_is_drafted_as_the_targets():
    """And a special token that the target lacks ends the draft."""
    assert (
        drafted(b" eggs.", end=[PIECES.special["</s>"], *PIECES.encode(b"never")])[-1] == TRAINED.special["<|im_end|>"]
    )
    assert TRAINED.decode(drafted(b" eggs.", end=[PIECES.special["<s>"]])) == b" eggs."


def test_an_accepted_draft_is_not_drafted_twice():
    text = b" sells the eggs. return a + b"
    draft = ScriptedDraft(b"Janet" + text)
    drafter = in_vocabulary(draft, "text", BOTH, INFO)
    drafter.open(1, np.array(TRAINED.encode(b"Janet"), np.int32), SamplingParams())
    said = []
    for _ in range(20):
        token_ids, node_ids = chain(drafter, 3)
        said += token_ids[:2]
        if token_ids:
            drafter.commit(1, np.array(token_ids[:2], np.int32), node_ids[:2])
    assert TRAINED.decode(said) == text
    assert draft.num_passes <= len(draft.tokens) + 1


def test_an_unknown_node_is_named():
    drafter = in_vocabulary(ScriptedDraft(b"Janet"), "text", BOTH, INFO)
    drafter.open(1, np.array(TEXT, np.int32), SamplingParams())
    with pytest.raises(EngineError, match="draft node 77 is unknown or was removed"):
        drafter.expand([Expansion(1, 77, (78,))])

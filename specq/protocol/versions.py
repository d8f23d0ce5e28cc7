"""The protocol versions that this side reads, and its capabilities beyond the older one. See docs/decisions/0017.

Rule: a message is written in the oldest version that has all its fields. So peers one version apart understand each
other, except for messages with newer content. The older peer refuses these as a whole.
"""

from __future__ import annotations

import re
from dataclasses import Field, field
from typing import Any

from specq.protocol.grammars import GRAMMAR_KINDS, grammar_capability

PROTOCOL_VERSION = 6
OLDEST_VERSION = PROTOCOL_VERSION - 1

OWNERS = "owners"  # keeps sessions of different owners apart, and knows the fields for that
GRAMMAR_TEXTS = "grammar texts"  # takes part in jobs with a grammar, and knows the origin of their forced tokens
ALLOWED_TOKENS = "allowed_token_ids"  # knows this parameter
BACKGROUND = "background"  # knows sessions that yield to others
SEVERAL_BROKERS = "brokers"  # registers with all brokers of a journal
MANY_DRAFTS = "drafts"  # reads the drafts of several sessions in one message
CAPABILITIES = (OWNERS, GRAMMAR_TEXTS, ALLOWED_TOKENS, BACKGROUND, SEVERAL_BROKERS, MANY_DRAFTS)  # of every worker
PROMPT_LOGPROBS = "prompt_logprobs"  # of verifiers whose engine returns log-probabilities of prompts
GRAMMAR_CAPABILITIES = tuple(map(grammar_capability, GRAMMAR_KINDS))  # of verifiers that build these grammars
DIALS_OUT = "dials out"  # of brokers: serves verifiers without an address, over the workers' own connections
BROKER_CAPABILITIES = (*CAPABILITIES, PROMPT_LOGPROBS, *GRAMMAR_CAPABILITIES, DIALS_OUT)  # passes on all but the last

_SPOKEN = re.compile(r"protocol version .*; this side speaks (?:\d+ and )?(\d+)")


def since(version: int, default: Any) -> Any:
    """Return a field that exists since this version. At its default it is not sent."""
    return field(default=default, metadata={"since": version})


def since_of(spec: Field[Any]) -> int:
    """Return the version that added a field, by default the oldest."""
    return int(spec.metadata.get("since", OLDEST_VERSION))


def refusal_of(version: object) -> str:
    """Return why a message of this version cannot be read. `version_spoken` parses it, in other versions too."""
    return f"protocol version {version!r}; this side speaks {OLDEST_VERSION} and {PROTOCOL_VERSION}"


def version_spoken(reason: str) -> int:
    """Return the newest version of a peer that refuses a message for its version. 0: it gives another reason."""
    found = _SPOKEN.search(reason)
    return int(found[1]) if found else 0

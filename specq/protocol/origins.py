"""The origin of each token: one byte per token, in verdicts, in the journal and in messages to clients.

Rule: a released code keeps its meaning, since journals hold it. Only journals of earlier versions have the first two
codes. To add a source of drafts, add a line at the end of `TABLE`. Its lane must be below all others, and at least 240.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specq.protocol.arrays import UInt8Array


class Origin(NamedTuple):
    """A possible origin of a token.

    - `name`: the name for clients and for the verifier's counters.
    - `shown`: the name of a source of drafts in all views. "": not a source of drafts.
    - `lane`: the lane of the nodes, for the verifier's own sources.
    """

    name: str
    shown: str = ""
    lane: int | None = None


TABLE = (  # a code is an index
    Origin("own"),  # the target's own token; whether drafts were present is unknown
    Origin("drafted", "draft"),  # an accepted draft of an unknown source
    Origin("plain"),  # the target's own: no draft was verified at this place
    Origin("corrected"),  # the target's own: drafts were verified at this place, and all were rejected
    Origin("draft worker", "draft worker"),  # an accepted draft of this source, as all that follow
    Origin("lookup", "lookup"),  # of prompt lookup, which verifiers had before suffix decoding
    Origin("colocated", "draft model in the verifier", 254),
    Origin("suffix", "lookup", 255),  # of what the verifier finds in known texts
    Origin("lookahead", "lookahead", 252),
    Origin("medusa", "Medusa heads", 253),
    Origin("eagle3", "EAGLE-3 head", 251),
    Origin("grammar", "grammar", 250),  # the only tokens that a job's grammar allows
    Origin("block", "block drafter", 249),
    Origin("engine", "drafter of the engine", 248),  # which the engine runs within its steps
)
ORIGINS = tuple(origin.name for origin in TABLE)
OWN, DRAFTED, PLAIN, CORRECTED, DRAFT_WORKER, LOOKUP, *_OF_VERIFIERS = ORIGINS
COLOCATED, SUFFIX, LOOKAHEAD, MEDUSA, EAGLE, GRAMMAR, BLOCK, OF_ENGINE, *_ = _OF_VERIFIERS
REMOTE = "remote"  # draft workers, under their name in the verifier's counters (`specq.protocol.stats`)
SHOWN = {origin.name: origin.shown for origin in TABLE if origin.shown}
SHOWN[REMOTE] = SHOWN[DRAFT_WORKER]
ORIGIN_CODES = {name: code for code, name in enumerate(ORIGINS)}
TARGETS_OWN = frozenset({OWN, PLAIN, CORRECTED})

LANES = {origin.name: origin.lane for origin in TABLE if origin.lane is not None}  # of the verifier's own sources
LEAST_OWN_LANE = min(LANES.values())  # draft workers have the lanes below
SUFFIX_LANE, COLOCATED_LANE = LANES[SUFFIX], LANES[COLOCATED]
LOOKAHEAD_LANE, GRAMMAR_LANE = LANES[LOOKAHEAD], LANES[GRAMMAR]

SHOWN_OF_LANE = {lane: SHOWN[name] for name, lane in LANES.items()}  # of lanes that do not belong to draft workers
ORIGIN_OF_LANE: UInt8Array = np.full(256, ORIGIN_CODES[DRAFT_WORKER], np.uint8)
ORIGIN_OF_LANE[[*LANES.values()]] = [ORIGIN_CODES[name] for name in LANES]
ORIGIN_OF_LANE.flags.writeable = False

_OWN_CODES = bytes(ORIGIN_CODES[name] for name in TARGETS_OWN)


def num_drafted(codes: bytes | bytearray) -> int:
    """Return the number of tokens that are accepted drafts."""
    return len(codes.translate(None, _OWN_CODES))


def origin_names(codes: bytes | bytearray) -> tuple[str, ...]:
    """Return the names of codes."""
    return tuple([ORIGINS[code] for code in codes])

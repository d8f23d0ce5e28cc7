"""Where each token of a text comes from: one byte a token, in verdicts, the journal and what clients receive.

Rule: a code, once released, keeps its meaning, since journals hold it. The first two are what journals of earlier
versions have; verifiers of today say more. To add a source of drafts: a line at the end of `TABLE`, with a lane
below all others, 240 at least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specq.protocol.arrays import UInt8Array


class Origin(NamedTuple):
    """Where a token may come from.

    name   what clients receive, and what verifiers count by
    shown  what users read of a source of drafts, in all views; "": it is none
    lane   of the verifier's own sources: that of their nodes
    """

    name: str
    shown: str = ""
    lane: int | None = None


TABLE = (  # a code is a place in it
    Origin("own"),  # the target's own token; it is not known whether drafts were there
    Origin("drafted", "draft"),  # an accepted draft; it is not known whose
    Origin("plain"),  # the target's own: no draft was verified at this place
    Origin("corrected"),  # the target's own: drafts were verified at this place, and none was accepted
    Origin("draft worker", "draft worker"),  # an accepted draft of this source, as all that follow
    Origin("lookup", "lookup"),  # of prompt lookup, which verifiers had before suffix decoding
    Origin("colocated", "draft model in the verifier", 254),
    Origin("suffix", "lookup", 255),  # of what the verifier finds in texts that are there
    Origin("lookahead", "lookahead", 252),
    Origin("medusa", "Medusa heads", 253),
    Origin("eagle3", "EAGLE-3 head", 251),
)
ORIGINS = tuple(origin.name for origin in TABLE)
OWN, DRAFTED, PLAIN, CORRECTED, DRAFT_WORKER, LOOKUP, COLOCATED, SUFFIX, LOOKAHEAD, MEDUSA, EAGLE, *_ = ORIGINS
REMOTE = "remote"  # draft workers, as what verifiers count names them (`specq.protocol.stats`)
SHOWN = {origin.name: origin.shown for origin in TABLE if origin.shown}
SHOWN[REMOTE] = SHOWN[DRAFT_WORKER]
ORIGIN_CODES = {name: code for code, name in enumerate(ORIGINS)}
TARGETS_OWN = frozenset({OWN, PLAIN, CORRECTED})

LANES = {origin.name: origin.lane for origin in TABLE if origin.lane is not None}  # of the verifier's own sources
LEAST_OWN_LANE = min(LANES.values())  # draft workers have the lanes below
SUFFIX_LANE, COLOCATED_LANE, MEDUSA_LANE = LANES[SUFFIX], LANES[COLOCATED], LANES[MEDUSA]
LOOKAHEAD_LANE, EAGLE_LANE = LANES[LOOKAHEAD], LANES[EAGLE]

SHOWN_OF_LANE = {lane: SHOWN[name] for name, lane in LANES.items()}  # of lanes that are no draft worker's
ORIGIN_OF_LANE: UInt8Array = np.full(256, ORIGIN_CODES[DRAFT_WORKER], np.uint8)
ORIGIN_OF_LANE[[*LANES.values()]] = [ORIGIN_CODES[name] for name in LANES]
ORIGIN_OF_LANE.flags.writeable = False

_OWN_CODES = bytes(ORIGIN_CODES[name] for name in TARGETS_OWN)


def num_drafted(codes: bytes | bytearray) -> int:
    """Return how many of the tokens are accepted drafts."""
    return len(codes.translate(None, _OWN_CODES))


def origin_names(codes: bytes | bytearray) -> tuple[str, ...]:
    """Return the names of codes."""
    return tuple([ORIGINS[code] for code in codes])

"""Where each token of a text comes from: one byte a token, in verdicts, the journal and what clients receive.

Rule: a code, once released, keeps its meaning, since journals hold it. The first two are what journals of earlier
versions have; verifiers of today say more. Users read the names of `SHOWN`, in all views. To add a source of drafts: a
name at the end of `ORIGINS`, its lane in `_SOURCES`, and what users read in `SHOWN`.
"""

from __future__ import annotations

import numpy as np

from specq.protocol.arrays import UInt8Array

SUFFIX_LANE = 255  # of what the verifier finds in texts that are there
COLOCATED_LANE = 254  # of the drafter in the verifier's process
MEDUSA_LANE = 253  # of heads on the target's hidden states
LOOKAHEAD_LANE = 252  # of lookahead decoding
EAGLE_LANE = 251  # of an EAGLE-3 head
LEAST_OWN_LANE = 251  # the least of the verifier's own; draft workers have the lanes below

OWN = "own"  # the target's own token; it is not known whether drafts were there
DRAFTED = "drafted"  # an accepted draft; it is not known whose
PLAIN = "plain"  # the target's own: no draft was verified at this place
CORRECTED = "corrected"  # the target's own: drafts were verified at this place, and none was accepted
DRAFT_WORKER, COLOCATED, SUFFIX = "draft worker", "colocated", "suffix"  # an accepted draft of this source
LOOKAHEAD, MEDUSA, EAGLE = "lookahead", "medusa", "eagle3"  # likewise
LOOKUP = "lookup"  # an accepted draft of prompt lookup, which verifiers had before SUFFIX

ORIGINS = (OWN, DRAFTED, PLAIN, CORRECTED, DRAFT_WORKER, LOOKUP, COLOCATED, SUFFIX, LOOKAHEAD, MEDUSA, EAGLE)
REMOTE = "remote"  # draft workers, as what verifiers count names them (`specq.protocol.stats`)
SHOWN = {
    DRAFT_WORKER: "draft worker",
    REMOTE: "draft worker",
    COLOCATED: "draft model in the verifier",
    SUFFIX: "lookup",
    LOOKUP: "lookup",
    LOOKAHEAD: "lookahead",
    MEDUSA: "Medusa heads",
    EAGLE: "EAGLE-3 head",
    DRAFTED: "draft",
}  # what users read of a source of drafts
ORIGIN_CODES = {name: code for code, name in enumerate(ORIGINS)}
TARGETS_OWN = frozenset({OWN, PLAIN, CORRECTED})

_SOURCES = {
    SUFFIX_LANE: SUFFIX,
    COLOCATED_LANE: COLOCATED,
    MEDUSA_LANE: MEDUSA,
    LOOKAHEAD_LANE: LOOKAHEAD,
    EAGLE_LANE: EAGLE,
}  # of lanes that are no draft worker's
_CODES_BY_LANE = [ORIGIN_CODES[_SOURCES.get(lane, DRAFT_WORKER)] for lane in range(256)]
ORIGIN_OF_LANE: UInt8Array = np.array(_CODES_BY_LANE, np.uint8)  # u8[256]
ORIGIN_OF_LANE.flags.writeable = False

_OWN_CODES = bytes(ORIGIN_CODES[name] for name in TARGETS_OWN)


SHOWN_OF_LANE = {lane: SHOWN[name] for lane, name in _SOURCES.items()}  # of lanes that are no draft worker's


def num_drafted(codes: bytes | bytearray) -> int:
    """Return how many of the tokens are accepted drafts."""
    return len(codes.translate(None, _OWN_CODES))


def origin_names(codes: bytes | bytearray) -> tuple[str, ...]:
    """Return the names of codes."""
    return tuple([ORIGINS[code] for code in codes])

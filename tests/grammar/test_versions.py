"""Each version of llguidance gives the masks of this MASK_VERSION, or refuses a grammar."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from bench.grammars import api_schemas
from bench.grammars.mask_digests import OTHERS, digest_of
from specq.grammar import versions
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol import JobError
from specq.protocol.grammars import MASK_VERSION
from specq.text import load_tokenizer_files

KEPT = Path(__file__).with_name("mask_digests.json")
GRAMMARS = OTHERS | {name: {"json_schema": schema} for name, schema in islice(api_schemas(), 0, None, 4)}


def digests():
    tokenizer = build_tokenizer(load_tokenizer_files(resolve_model("tiny", "target")), 4096, (0,))
    return {name: digest_of(tokenizer, json.dumps(grammar), 32) for name, grammar in GRAMMARS.items()}


def test_masks_are_those_of_their_version():
    """Where masks change on purpose, raise MASK_VERSION; `python -m tests.grammar.test_versions` writes the file."""
    kept = json.loads(KEPT.read_text())
    assert kept["mask_version"] == MASK_VERSION
    found = digests()
    if versions.installed() < versions.NEGATIVE_MULTIPLES:
        found = {name: one for name, one in found.items() if "multipleOf needs a minimum" not in one}
    assert len(found) >= 50
    assert {name: kept["digests"][name] for name in found} == found


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ({"items": {"type": "integer", "multipleOf": 5}}, True),
        ({"anyOf": [{"type": "number", "multipleOf": 0.5, "minimum": -1}]}, True),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0}, False),
        ({"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 3}, False),
        ({"type": "integer", "minimum": -5}, False),
    ],
)
def test_an_old_llguidance_refuses_multiples_that_may_be_negative(schema, is_refused, monkeypatch):
    versions.check_version({"json_schema": schema} if not is_refused else {})
    monkeypatch.setattr(versions, "installed", lambda: (1, 7))
    if not is_refused:
        versions.check_version({"json_schema": schema})
        return
    with pytest.raises(JobError, match=r"llguidance 1\.7"):
        versions.check_version({"json_schema": schema})


if __name__ == "__main__":
    KEPT.write_text(json.dumps({"mask_version": MASK_VERSION, "digests": digests()}, indent=1) + "\n")

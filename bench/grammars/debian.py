"""The schemas of Debian's package json-schema-test-suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HOME = Path("/usr/share/json-schema-test-suite/tests")
DRAFTS = {  # those that llguidance reads, if the package has them
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


class SuiteSchema(NamedTuple):
    """A schema of the suite, which names its draft, and whether each of its examples is valid."""

    name: str  # draft/file/number
    draft: str
    schema: Any  # an object, or true or false
    examples: list[tuple[Any, bool]]


def suite_schemas(home: Path = HOME) -> Iterator[SuiteSchema]:
    """Yield the schemas of the drafts that the suite has. Raises FileNotFoundError if it is not installed."""
    folders = [home / draft for draft in DRAFTS if (home / draft).exists()]
    if not folders:
        raise FileNotFoundError(f"{home} has none of {', '.join(DRAFTS)}: apt-get install json-schema-test-suite")
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            for number, case in enumerate(json.loads(path.read_text())):
                name = f"{path.relative_to(home).with_suffix('')}/{number}"
                examples = [(test["data"], test["valid"]) for test in case["tests"]]
                yield SuiteSchema(name, folder.name, _with_draft(case["schema"], DRAFTS[folder.name]), examples)


def _with_draft(schema: Any, draft: str) -> Any:
    return {"$schema": draft} | schema if isinstance(schema, dict) else schema

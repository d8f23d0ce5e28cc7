"""`specq bench grammars`: texts that follow a JSON schema are valid."""

from __future__ import annotations

import sys
from typing import Any

from bench.report import Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite

COUNTED = ("schemas", "taken", "refused", "failed", "stop", "length", "invalid")


@suite("grammars")
@repeatable("--model models", str, ("tiny", "smollm2"), "Target, by name.")
@repeatable("--corpus chosen", str, ("api", "suite"), "Schemas: see above.")
@option("--max-tokens", COUNT, 256, "Maximum tokens of each text.")
def command(report: Report, *, models: tuple[str, ...], chosen: tuple[str, ...], max_tokens: int) -> None:
    """Serve each JSON schema once, greedy. Check every text that ends by itself with the package jsonschema.

    api: 200 schemas in the forms of public APIs, whose texts end within 256 tokens.

    suite: those of Debian's package json-schema-test-suite, which must be installed.

    The exit status is 1 if a text is invalid.
    """
    from bench.grammars.serving import corpora, serve

    report.update(settings={"models": list(models), "corpora": list(chosen), "max_tokens": max_tokens})
    schemas = {name: corpus for name, corpus in corpora().items() if name in chosen}
    found: dict[str, Any] = {}
    for model in models:
        for corpus, one in serve(model, schemas, max_tokens):
            found[f"{model}, {corpus}"] = summary = one.summary()
            tell(f"{model}, {corpus}: " + ", ".join(f"{name} {summary[name]}" for name in COUNTED))
            report.update(figures={f"{name}, ended by stop": _share(one) for name, one in found.items()}, results=found)
    rows = [(name, *(one[count] for count in COUNTED)) for name, one in found.items()]
    show([("MODEL, SCHEMAS", *map(str.upper, COUNTED)), *rows])
    sys.exit(1 if any(one["invalid"] for one in found.values()) else 0)


def _share(one: dict[str, Any]) -> Any:
    return figure("share", [one["stop"] / max(1, one["taken"])])

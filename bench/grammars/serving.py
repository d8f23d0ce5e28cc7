"""Serves each schema once, greedy, and checks with the package jsonschema every text that ends by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

from bench.deployments import deployment
from bench.grammars.debian import suite_schemas
from bench.grammars.forms import api_schemas
from specq.client import Client, Result
from specq.processes.servers import Servers
from specq.protocol import JobError

IN_FLIGHT = 16
MOST_DIGITS = 2000  # of a quotient
WHOLE_DIGITS = 25  # 1.0 is an integer for JSON schema; larger numbers stay as they are
MOST_SHOWN = 300  # characters of a schema in its prompt
MOST_WAIT_S = 600.0


@dataclass
class Found:
    """What became of some schemas."""

    schemas: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why grammars were refused
    failed: list[str] = field(default_factory=list)  # jobs that failed for another reason
    finished: Counter[str] = field(default_factory=Counter)  # by finish_reason
    invalid: list[dict[str, str]] = field(default_factory=list)  # texts that ended by `stop`
    cut: list[str] = field(default_factory=list)  # schemas whose text ended by `length`
    tokens: int = 0

    def summary(self) -> dict[str, Any]:
        refused = sum(self.reasons.values())
        taken = self.schemas - refused - len(self.failed)
        counts = {"schemas": self.schemas, "taken": taken, "refused": refused, "failed": len(self.failed)}
        ended = {"stop": self.finished["stop"], "length": self.finished["length"], "invalid": len(self.invalid)}
        lists = {
            "reasons": dict(self.reasons.most_common()),
            "failures": self.failed,
            "cut": self.cut,
            "invalid_texts": self.invalid,
        }
        return counts | ended | {"tokens": self.tokens} | lists


def corpora() -> dict[str, list[tuple[str, Any]]]:
    """Return the schemas by corpus. A schema that is true or false cannot be a job's grammar."""
    suite = [(one.name, one.schema) for one in suite_schemas() if isinstance(one.schema, dict)]
    return {"api": list(api_schemas()), "suite": suite}


def serve(model: str, schemas: Mapping[str, list[tuple[str, Any]]], max_tokens: int) -> Iterator[tuple[str, Found]]:
    """Serve each corpus with a broker and a verifier that drafts from the text; yield what became of it."""
    with Servers(deployment(model)) as servers:
        servers.wait_ready()
        for name, corpus in schemas.items():
            yield name, _served(servers.client, corpus, max_tokens)


def _served(client: Client, corpus: Iterable[tuple[str, Any]], max_tokens: int) -> Found:
    found, jobs = Found(), []
    for name, schema in corpus:
        found.schemas += 1
        prompt = f"Answer with JSON that follows this schema: {json.dumps(schema)[:MOST_SHOWN]}\nJSON: "
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "grammar": {"json_schema": schema}}
        try:
            jobs.append((name, schema, client.submit(prompt, **options)))
        except JobError as error:
            _note(found, name, error)
        if len(jobs) >= IN_FLIGHT:
            _count(found, *jobs.pop(0))
    for one in jobs:
        _count(found, *one)
    return found


def _count(found: Found, name: str, schema: Any, job: Any) -> None:
    try:
        result: Result = job.result(MOST_WAIT_S)
    except JobError as error:
        _note(found, name, error)
        return
    found.tokens += len(result.token_ids)
    found.finished[result.finish_reason] += 1
    if result.finish_reason == "length":
        found.cut.append(name)
    elif reason := why_invalid(schema, result.text):
        found.invalid.append({"schema": name, "text": result.text, "reason": reason})


def why_invalid(schema: Any, text: str) -> str:
    """Return why a text does not follow a schema, or ""."""
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        value = json.loads(text, parse_float=_exact)
    except ValueError as error:
        return f"not JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=_exact)
    with localcontext(prec=MOST_DIGITS):
        errors = sorted(kind(exact, format_checker=FormatChecker()).iter_errors(value), key=str)
    return errors[0].message if errors else ""


def _exact(number: str) -> Decimal | int:
    """Return a number with a fraction as it is written. As floats, 201802221424.0001 is no multiple of 0.0001."""
    exact = Decimal(number)
    is_whole = exact.adjusted() < WHOLE_DIGITS and exact == exact.to_integral_value()
    return int(exact) if is_whole else exact


def _note(found: Found, name: str, error: JobError) -> None:
    """Count a refused grammar by its reason without the place, and any other failure by itself."""
    if error.code == "invalid":
        found.reasons[str(error).partition(", at #")[0][:120]] += 1
    else:
        found.failed.append(f"{name}: {error.code}: {error}")

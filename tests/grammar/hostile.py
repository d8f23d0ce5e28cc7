"""Grammars that cost too much, allow nothing or are wrong, and what is said of them. None: they are served."""

from __future__ import annotations

from typing import Any

LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
TREE = {"x": {"$ref": "#/$defs/a"}, "y": {"anyOf": [{"$ref": "#/$defs/a"}, {"items": {"$ref": "#/$defs/a"}}]}}
DOUBLED = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)} | {"a30": {"type": "string"}}
WIDE = {f"p{i}": {"enum": [f"value {i} {j}" for j in range(12)]} for i in range(300)}  # 64 KB
REGEXES = ("[a-z]+ ", "(..)", "(...)", "(.....)", "(.......)")
AND = " & ".join(f"/({one}){{1,60}}/" for one in REGEXES)

HOSTILE: dict[str, tuple[dict[str, Any], str | None]] = {
    "maxLength": ({"json_schema": {"type": "string", "maxLength": 10**9}}, None),
    "maxItems": ({"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}}, None),
    "minItems": ({"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}}, None),
    "masks slowly": ({"regex": "(ab){1000000}"}, "the mask after . tokens of a trial takes|more than .* MB of memory"),
    "masks slowly later": (
        {"json_schema": {"type": "array", "items": {"type": "string", "pattern": "^(ab){1000000}$"}}},
        "the mask after . tokens of a trial takes|more than .* MB of memory",
    ),
    "masks slowly behind a text": (
        {"regex": "(ab){1000000}", "after": "</think>"},
        "the mask after . tokens of a trial takes|more than .* MB of memory",
    ),
    "nested counts": ({"regex": "((((a{1,99}b){1,99}c){1,99}d){1,99}e){1,99}"}, None),
    "exponential automaton": ({"regex": ".*a.{18}b.{18}"}, None),
    "exponential backtracking": ({"regex": "(x+x+)+y"}, None),
    "intersections": ({"lark": f"start: T\nT: {AND} & /.*q.*w.*/"}, "fuel exhausted"),
    "circular $ref": ({"json_schema": {"$ref": "#/$defs/a", "$defs": LOOP}}, "nothing is allowed"),
    "$ref to itself": ({"json_schema": {"$ref": "#"}}, "nothing is allowed"),
    "recursive $ref": ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"properties": TREE}}}}, None),
    "doubled $ref": ({"json_schema": {"$ref": "#/$defs/a0", "$defs": DOUBLED}}, None),
    "64 KB": ({"json_schema": {"type": "object", "properties": WIDE}}, None),
    "ambiguous": ({"lark": 'start: a\na: a a | a a a | "x" | ""\n'}, None),
    "parentheses": ({"lark": f"start: {'(' * 30_000}x{')' * 30_000}"}, "too deeply nested"),
    "parentheses of a regex": ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "exceed|nest"),
    "unicode": ({"json_schema": {"required": ["ï☃😀"], "properties": {"ï☃😀": {"const": "日本\u0000"}}}}, None),
    "empty enum": ({"json_schema": {"properties": {"a": {"items": {"enum": []}}}, "enum": []}}, "Unsatisfiable"),
    "contradiction": ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\)"),
    "nothing": ({"json_schema": {"not": {}}}, "not"),
    "unknown keyword": (
        {"json_schema": {"properties": {"a/b": {"items": {"uniqueItems": True}}}}},
        r'\["uniqueItems"\], at #/properties/a~1b/items; leave this out, or let "strict": false ignore it$',
    ),
    "oneOf": (
        {"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "oneOf constraints are not supported, at #; leave this out,",
    ),
    "unknown rule": ({"lark": "start: x"}, r'at 1\(8\): unknown name: "x"'),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
}

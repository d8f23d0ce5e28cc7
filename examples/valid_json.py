"""Ask for an object that follows a JSON schema, and count the tokens that were drafted from the schema.

python examples/valid_json.py "Invent a person."
"""

import json
import os
import sys

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def main(question: str) -> None:
    asked = [{"role": "user", "content": question}]
    with specq.Client(BROKER) as client:
        pieces = [*client.stream(messages=asked, grammar={"json_schema": SCHEMA}, max_tokens=200)]
    text = "".join(piece.text for piece in pieces)
    if pieces[-1].result.finish_reason != "stop":
        sys.exit(f"the text was cut: {text}")
    print(json.loads(text))
    origins = [origin for piece in pieces for origin in piece.origins]
    print(f"{origins.count('grammar')} of {len(origins)} tokens were drafted from the schema")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "Invent a person.")

"""The masks of each grammar along a fixed walk, as one digest.

Run `python bench/__main__.py bench.grammars.mask_digests OUT` with two versions of llguidance, and compare the files.
Verifiers of one MASK_VERSION must give the same masks.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.grammars import api_schemas, suite_schemas
from specq.grammar.building import Walk, build_matcher, drawn
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import GrammarTokenizer, build_tokenizer
from specq.models import resolve_model
from specq.protocol import JobError
from specq.text import load_tokenizer_files

NUM_STEPS = 96
SEEDS = 3
MODELS = {"tiny": 4096, "smollm2": 49152}
TAG = {"begin": "<f=a>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "end": "</f>"}
OTHERS: dict[str, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "regex": {"regex": r"(\+?[0-9]{1,3}[ -])?[a-zé]{2,20}(\.|/)[^\n]{0,40}"},
    "choice": {"choice": ["yes", "no", "not at all", "日本語", 'a "quote"']},
    "lark": {"lark": 'start: e\ne: e "+" t | t\nt: /[0-9]{1,4}/ | "(" e ")"\n'},
    "tags": {"structural_tag": {"structures": [TAG], "triggers": ["<f="]}},
    "required tags": {"structural_tag": {"structures": [TAG], "triggers": ["<f="]}, "required": True, "most": 2},
    "after": {"json_object": True, "after": "</think>"},
    "not strict": {"json_schema": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "strict": False},
}


def main(out: Path) -> None:
    """Write {model/grammar: digest}. A refused grammar has its reason instead."""
    found: dict[str, str] = {}
    for model, vocab_size in MODELS.items():
        files = load_tokenizer_files(resolve_model(model, "target"))
        tokenizer = build_tokenizer(files, vocab_size, (0,))
        found |= {f"{model}/{name}": digest_of(tokenizer, grammar) for name, grammar in _grammars().items()}
    out.write_text(json.dumps({"llguidance": version("llguidance"), "digests": found}, indent=1))


def _grammars() -> dict[str, str]:
    suite = [(one.name, one.schema) for one in suite_schemas() if isinstance(one.schema, dict)]
    schemas = {name: json.dumps({"json_schema": schema}) for name, schema in (*api_schemas(), *suite)}
    return schemas | {name: json.dumps(grammar) for name, grammar in OTHERS.items()}


def digest_of(tokenizer: GrammarTokenizer, grammar: str, num_steps: int = NUM_STEPS) -> str:
    """Return a digest of all masks and forced tokens along walks that draw allowed tokens."""
    digest = hashlib.blake2b(digest_size=12)
    closers = [ids[0] for text in ('"', '",', "}", "]", ",", "0", "a") if len(ids := tokenizer.ids(text)) == 1]
    for seed in range(SEEDS):
        walk = Walk((), closers if seed else (), seed, num_steps)
        try:
            matcher = build_matcher(tokenizer, grammar, GrammarLimits())
        except JobError as error:
            return str(error)
        draw = walk.draw()
        for _ in range(num_steps):
            mask = matcher.compute_bitmask()
            forced = matcher.compute_ff_tokens()
            digest.update(mask + repr((forced, matcher.is_stopped(), matcher.is_accepting())).encode())
            token_ids = forced or drawn(mask, walk.preferred if draw.random() < 0.5 else (), draw)
            if matcher.is_stopped() or not token_ids or not matcher.consume_tokens(token_ids):
                break
    return digest.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

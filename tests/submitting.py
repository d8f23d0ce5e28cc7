"""`specq submit` run on a file of prompts, for tests."""

import json

from click.testing import CliRunner

from specq.cli import main

GOOD = '{"prompt": "two eggs", "max_tokens": 100}\n'


def run(broker, tmp_path, text, *options, to_file=True):
    """Run `specq submit` on a file with this text; return the outcome and the result lines."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_bytes(text if isinstance(text, bytes) else text.encode())
    target = ["--out", str(out)] if to_file else []
    outcome = CliRunner().invoke(main, ["submit", str(prompts), *target, "--broker", broker.address, *options])
    lines = out.read_text("utf-8") if to_file and out.exists() else outcome.stdout
    return outcome, [json.loads(line) for line in lines.splitlines()] if outcome.exit_code < 2 else []

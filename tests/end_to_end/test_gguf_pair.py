"""A GGUF file with SentencePiece's tokenizer, drafted for by the file beside it, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specq.client.result import Result
from specq.config import NO_MODEL, Config, DraftConfig, TargetConfig
from specq.models.draft_choice import choose_draft
from specq.processes.servers import Servers, on_free_port
from specq.testing.checkpoints import save_random
from specq.testing.checkpoints_gguf import MADE, Q, sentencepiece_keys, write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = ("a day", "Janet sells 16 \U0001f642", "<user> [INST]\n return", "e")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["a day", "\u00e9 \U0001f642"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A file of random values. The file beside it has its values in fewer bits, so that it drafts well."""
    home = tmp_path_factory.mktemp("pair")
    save_random(home / "source", {"model_type": "llama", **MADE})
    write_gguf(home / "source", home / "draft.gguf", linear=Q.Q8_0, metadata=sentencepiece_keys(352))
    return write_gguf(home / "source", home / "target.gguf", linear=Q.F32, metadata=sentencepiece_keys(352))


def texts(target: Path, draft: str) -> tuple[list[Result], Result]:
    """Return the answers to all prompts, greedy and not, and one under a grammar."""
    serving = TargetConfig(model=str(target), drafts="always", prompt_lookup="none")
    with Servers(on_free_port(Config(target=serving, draft=DraftConfig(model=draft)))) as servers:
        servers.wait_ready()
        client = servers.client
        found = [
            client.generate(prompt, temperature=temperature, seed=7, max_tokens=40)
            for prompt in PROMPTS
            for temperature in (0.0, 0.8)
        ]
        limited = client.generate("a", temperature=1.0, seed=3, max_tokens=80, grammar={"json_schema": SCHEMA})
    return found, limited


def test_texts_are_those_without_a_draft_model(target):
    assert choose_draft(str(target)).model == str(target.with_name("draft.gguf"))
    (drafted, limited), (plain, plain_limited) = texts(target, ""), texts(target, NO_MODEL)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert sum(one.stats["accepted_tokens"] for one in drafted) > 40
    assert sum(one.stats["draft_tokens"] for one in plain) == 0
    assert json.loads(limited.text) == json.loads(plain_limited.text)
    assert json.loads(limited.text)["a"] in SCHEMA["properties"]["a"]["enum"]

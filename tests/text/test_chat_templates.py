"""What chat templates receive, and that specq renders it as transformers does; the limits of templates."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from specq.models import resolve_model
from specq.protocol import JobError
from specq.testing.tokenizer import tokenizer_files, tokenizer_json
from specq.text import TextCodec, load_tokenizer_files
from specq.text import chat_template as ours
from specq.text.messages import normalised
from specq.text.template_limits import SIZE_LIMIT
from tests.text.conversations import CONVERSATIONS, NORMALISED, TOOLS, USER

TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
LISTS = {"default and tool_use": {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["hermes"]}}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|endoftext|>"}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"add_generation_prompt": False, "enable_thinking": False, "documents": [{"text": "Köln"}]},
    {"tools": TOOLS, "reasoning_effort": "low", "tools_in_user_message": False, "date_string": "1 May", "eos_token": "<e>"},
]
FROZEN = datetime(2026, 2, 3, 4, 5, 6)  # noqa: DTZ001 - local time, as templates see it
REFUSED = "refused"

# Where specq and transformers differ on purpose. Each pair is a template, and what transformers says of it.
# deepseek_r1 adds arguments to a text, so it wants the JSON text: specq gives that, transformers an object that cannot be added.
INTENDED = {"deepseek_r1": 'can only concatenate str (not "dict") to str'}


@pytest.fixture(autouse=True)
def _frozen(monkeypatch):
    """Stop the clock of both."""
    monkeypatch.setattr(ours, "now", lambda: FROZEN)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: FROZEN))


def codec_of(template: Any, **named: Any) -> TextCodec:
    entries = [{"name": name, "template": text} for name, text in template.items()] if isinstance(template, dict) else template
    config = {"chat_template": entries, **NAMED, **named}
    return TextCodec({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)})


def theirs_of(template: Any) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json()), chat_template=template, **NAMED)


def attempt(render: Any, messages: list[Any], variables: dict[str, Any]) -> tuple[str, str]:
    """Return what is rendered, or "refused" and the reason."""
    try:
        return "", render(messages, **{"add_generation_prompt": True, **variables})
    except Exception as error:  # noqa: BLE001 - transformers passes on whatever a template raises
        assert render.__name__ != "render_chat" or type(error) is JobError, error
        return REFUSED, str(error)


def test_messages_are_brought_into_one_form():
    for name, (sent, received) in NORMALISED.items():
        before = json.dumps(sent)
        found = normalised([sent])
        assert found == [received], name
        assert list(found[0]) == list(received), name
        assert normalised(found) == found, f"{name}: once more"
        assert json.dumps(sent) == before, f"{name}: the caller's own message"


def test_every_conversation_is_rendered_as_transformers_renders_it():
    """All templates with all conversations and variables; each difference is listed."""
    pairs, differing, rendered = 0, {}, set()
    for name, template in (TEMPLATES | LISTS).items():
        codec, theirs = codec_of(template), theirs_of(template)
        for variables in VARIABLES:
            for title, messages in CONVERSATIONS.items():
                found = attempt(codec.render_chat, messages, variables)
                wanted = attempt(
                    lambda *args, _theirs=theirs, **given: _theirs.apply_chat_template(*args, tokenize=False, **given),
                    normalised(messages),
                    variables,
                )
                pairs += 1
                if found[0] == REFUSED == wanted[0]:
                    assert found[1] == f"the chat template refuses the messages: {wanted[1]}", (name, title)
                elif found != wanted:
                    differing[name, title] = wanted
                else:
                    rendered.add((name, title))
    assert {(name, reason) for (name, _), (_, reason) in differing.items()} == set(INTENDED.items())
    assert pairs == len(TEMPLATES | LISTS) * len(VARIABLES) * len(CONVERSATIONS)
    assert len(TEMPLATES) >= 20
    assert all((name, "one question") in rendered for name in TEMPLATES)


def test_arguments_that_are_added_to_a_text_are_the_text_that_was_sent():
    codec = codec_of(TEMPLATES["deepseek_r1"])
    given = '{"city" : "K"}'
    said = codec.render_chat([USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": given}}]}])
    assert f"<|tool▁sep|>f\n```json\n{given}\n```" in said
    assert "None" not in said


def test_the_bundled_models_own_templates():
    for model in ("tiny", "smollm2"):
        try:
            folder = resolve_model(model, "target")
        except Exception:  # noqa: BLE001 - its package is not installed here
            continue
        codec, theirs = TextCodec(load_tokenizer_files(folder)), PreTrainedTokenizerFast.from_pretrained(folder)
        for messages in CONVERSATIONS.values():
            wanted = theirs.apply_chat_template(normalised(messages), tokenize=False, add_generation_prompt=True)
            assert codec.render_chat(messages) == wanted

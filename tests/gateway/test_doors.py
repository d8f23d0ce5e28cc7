"""A conversation reaches the model as the same text, whichever way it comes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import specq
from specq.protocol import FetchTokenizer, JobError, Message, Submit
from specq.testing.fake_broker import INFO, FakeBroker, answer
from specq.testing.tokenizer import tokenizer_json
from specq.text import TextCodec, tokenizer_chunks
from tests.gateway.serving import connected, running
from tests.submitting import run
from tests.text.conversations import CONVERSATIONS, TOOLS

REFUSES = "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
TEMPLATES = [
    {"name": "default", "template": REFUSES + "{{ messages | tojson }}{{ tools | tojson }}"},
    {"name": "tool_use", "template": "{{ tools | tojson }}{{ messages | tojson }}"},
]
FILES = {
    "tokenizer.json": tokenizer_json(),
    "tokenizer_config.json": json.dumps({"chat_template": TEMPLATES}),
}
CODEC, SERVED = TextCodec(FILES), replace(INFO, max_length=1 << 20)
TITLES = [
    "system first",
    "parallel calls, then an answer",
    "parts everywhere",
    "the answer's own nulls",
    "arguments cut off",
]
TITLES += ["refused: the refusal alone", "a call, content missing", "results in another order"]


def reply(message: Message) -> Any:
    return list(tokenizer_chunks(SERVED, FILES)) if isinstance(message, FetchTokenizer) else answer(message)


@pytest.fixture
def broker():
    with FakeBroker(reply) as fake:
        yield fake


def text_of(broker: FakeBroker) -> str:
    """Return the prompt of the last job."""
    *_, job = (message for message in broker.heard if isinstance(message, Submit))
    return CODEC.decode(job.prompt_ids.tolist(), skip_special=False)


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the items of `/v1/responses`, as OpenAI's clients send them back."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            parts = (
                [part | {"type": "input_text"} for part in message["content"]]
                if isinstance(message["content"], list)
                else None
            )
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": parts or message["content"],
                }
            )
            continue
        if message.get("content") is not None:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls") or []
        ]
    return items


def test_every_door_renders_the_same(broker, own_cache, tmp_path):
    with running(broker.address) as gateway, connected(gateway) as http, specq.Client(broker.address) as client:
        for title in TITLES:
            messages, seen = CONVERSATIONS[title], {}
            for variables in ({}, {"tools": TOOLS}):
                wanted = CODEC.render_chat(messages, **variables)
                chat = {"messages": messages, "max_tokens": 1} | (
                    {**variables, "tool_choice": "none"} if variables else {}
                )
                assert http.post("/v1/chat/completions", json=chat).status_code == 200, title
                seen["chat"] = text_of(broker)
                tokens = http.post("/tokenize", json={"messages": messages, **variables}).json()["tokens"]
                seen["tokenize"] = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
                line = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": variables}
                seen["client"] = client.generate(**line).prompt
                _, results = run(broker, tmp_path, json.dumps(line))
                seen["submit"] = results[0]["prompt"]
                assert seen == dict.fromkeys(seen, wanted), title


def test_responses_get_calls_as_chats_do(broker, own_cache):
    """Its items have neither names nor an answer's own nulls; all else is the same."""
    with running(broker.address) as gateway, connected(gateway) as http:
        for title in (
            "system first",
            "parallel calls, then an answer",
            "results in another order",
            "arguments cut off",
        ):
            messages = CONVERSATIONS[title]
            answered = http.post("/v1/responses", json={"input": as_items(messages), "max_output_tokens": 1})
            assert answered.status_code == 200, answered.text
            assert text_of(broker) == CODEC.render_chat(messages), title
        wrong = http.post("/v1/responses", json={"input": [{"type": "function_call", "call_id": "1", "name": "f"}]})
        assert (wrong.status_code, wrong.json()["error"]["message"]) == (400, "input[0].arguments must be a string")


def test_every_door_refuses_the_same(broker, own_cache, tmp_path):
    """What the template refuses, and a message without content, with the same reason."""
    cases = {"the chat template refuses the messages: not this": [{"role": "user", "content": "refuse"}]}
    cases['messages[1] has no "content"'] = [{"role": "user", "content": "a"}, {"role": "tool", "content": None}]
    cases["messages[0].tool_calls must be a list of"] = [{"role": "assistant", "content": "", "tool_calls": "f()"}]
    with running(broker.address) as gateway, connected(gateway) as http, specq.Client(broker.address) as client:
        for reason, messages in cases.items():
            answers = [http.post(path, json={"messages": messages}) for path in ("/v1/chat/completions", "/tokenize")]
            assert [answered.status_code for answered in answers] == [400, 400]
            assert all(reason in answered.json()["error"]["message"] for answered in answers)
            with pytest.raises(JobError) as refused:
                client.generate(messages=messages)
            outcome, results = run(broker, tmp_path, json.dumps({"messages": messages}))
            assert reason in str(refused.value)
            assert (outcome.exit_code, reason in results[0]["error"]) == (1, True)

"""Required calls with real models: whatever the model would rather write, each answer is valid calls."""

from __future__ import annotations

import json

import httpx2
import jsonschema
import openai
import pytest

from specq.config.values import free_address
from specq.testing.waiting import wait_until
from tests.each import each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
SCHEMAS = {"weather": {**CITY, "additionalProperties": False}, "now": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = [{"role": "user", "content": "Is it warm in Oslo?"}]


@pytest.fixture
def start(spawn, own_cache):
    """Return a function that starts a broker, a verifier of a model and a gateway, and returns OpenAI's client."""

    def started(model: str) -> openai.OpenAI:
        broker, http = free_address(), free_address()
        spawn("broker", "--bind", broker, "--journal", "none")
        spawn("worker", "--role", "target", "--broker", broker, "--model", model, "--threads", "1")
        spawn("serve", "--broker", broker, "--bind", http)
        url = http.replace("tcp", "http")
        wait_until(lambda: is_ready(url), 240)
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    return started


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


def check(call) -> str:
    """Check the arguments of a call; return its name."""
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return str(call.function.name)


@each(("model", "n"), [("tiny", 8), ("smollm2", 2)])
def test_required_calls_are_always_valid(start, model, n):
    """Greedy and sampled, whole and as a stream, in chats and in `/v1/responses`."""
    asked = {"model": model, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with start(model) as api:
        check_all(api, asked, n)


def check_all(api, asked, n):
    for temperature, seed in ((0.0, 1), (1.0, 2)):
        chat = {**asked, "messages": ASKED, "max_tokens": 150, "temperature": temperature, "seed": seed}
        answer = api.chat.completions.create(**chat, n=n)
        with api.chat.completions.stream(**chat) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (*answer.choices, streamed):
            assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
            assert [check(call) for call in choice.message.tool_calls] in (["weather"], ["now"])
        if not temperature:
            assert (
                streamed.message.tool_calls[0].function.arguments
                == answer.choices[0].message.tool_calls[0].function.arguments
            )
    named = {"type": "function", "function": {"name": "weather"}}
    choice = api.chat.completions.create(**{**asked, "tool_choice": named}, messages=ASKED, max_tokens=150).choices[0]
    assert [check(call) for call in choice.message.tool_calls] == ["weather"]
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    response = api.responses.create(**{**asked, "tools": flat}, input="Is it warm in Oslo?", max_output_tokens=150)
    assert [(item.type, item.status) for item in response.output] == [("function_call", "completed")]
    jsonschema.validate(json.loads(response.output[0].arguments), SCHEMAS[response.output[0].name])

"""Blocks of Anthropic's answers, whole and as a stream: text, thinking, calls."""

import json

from specq.client import Piece, Result
from specq.gateway import sse
from specq.gateway.answers import Head
from specq.gateway.completion_call import Call
from specq.gateway.messages_answer import Messages
from specq.gateway.parts import MAY_THINK, PartsForm
from tests.each import each

FORM = PartsForm("hermes", frozenset(["add", "sub"]), MAY_THINK, "k")
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "sub"}</tool_call>'
HEAD = Head("msg_1", 0, "fake", "f", (7,))


def whole_and_stream(said, finish="stop", cut=3):
    """Return the whole answer of a text, and what a client assembles from the stream of its pieces."""
    result = Result("r", None, said, [1, 2], finish)
    form = Messages(Call({}, form=FORM))
    stream = form.events(HEAD, sse.start(1), with_ids=False)
    pieces = [Piece(said[start : start + cut]) for start in range(0, len(said), cut)]
    data = stream.opening() + b"".join(map(stream.take, pieces)) + stream.take(Piece("", result=result))
    return form.whole(HEAD, [result]), assembled((data + stream.closing()).decode())


def assembled(data):
    """Return the message that a stream describes, as Anthropic's client assembles it; each event where it may be."""
    message, texts = None, {}
    for event in (json.loads(one.split("data: ")[1]) for one in data.strip().split("\n\n")):
        match event["type"]:
            case "message_start":
                assert message is None
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(texts)
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                kind, delta = event["delta"].pop("type"), event["delta"]
                block = message["content"][event["index"]]
                if kind == "input_json_delta":
                    texts[event["index"]] += delta["partial_json"]
                else:
                    assert kind.removesuffix("_delta") in (block["type"], "signature")
                    block |= {name: block[name] + more for name, more in delta.items()}
            case "content_block_stop":
                block, given = message["content"][event["index"]], texts[event["index"]]
                if given:
                    block["input"] = json.loads(given) if given.endswith("}") else given
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case "message_stop" | "ping":
                pass
    return message


@each("cut", [1, 2, 7, 1000])
def test_thinking_text_and_calls_are_blocks(cut):
    whole, stream = whole_and_stream(f"<think>Hm.</think>\n\nYes.\n{CALLS}", cut=cut)

    assert whole == stream
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("Hm.", "Yes.")
    assert [(call["name"], call["input"]) for call in whole["content"][2:]] == [("add", {"a": 1}), ("sub", {})]
    assert len({call["id"] for call in whole["content"][2:]}) == 2
    assert whole["stop_reason"] == "tool_use"


@each(
    ("said", "finish", "kinds", "reason"),
    [
        ("", "stop", ["text"], "end_turn"),
        ("Yes.", "length", ["text"], "max_tokens"),
        ("Yes. <tool", "length", ["text"], "max_tokens"),
        ("Yes.", "cancelled", ["text"], "cancelled"),
        ("<think>Hm", "length", ["thinking"], "max_tokens"),
        (CALLS, "length", ["tool_use", "tool_use"], "max_tokens"),
        ("<tool_call>not one</tool_call>", "stop", ["text"], "end_turn"),
    ],
)
def test_ends_of_answers(said, finish, kinds, reason):
    whole, stream = whole_and_stream(said, finish)

    assert whole == stream
    assert ([block["type"] for block in whole["content"]], whole["stop_reason"]) == (kinds, reason)


def test_a_call_that_is_cut():
    """Text in a whole answer; in a stream a block whose JSON is not complete, as at Anthropic."""
    said = '<tool_call>{"name": "add", "arguments": {"a": '
    whole, stream = whole_and_stream(said, "length")

    assert whole["content"] == [{"type": "text", "text": said}]
    assert (stream["content"][0]["type"], stream["content"][0]["input"]) == ("tool_use", '{"a": ')
    assert whole["stop_reason"] == stream["stop_reason"] == "max_tokens"

"""Streams as bytes: wherever one breaks, what was sent and what is sent after it make the whole."""

from dataclasses import replace

import orjson
import pytest

from specq.client import Piece, Result
from specq.gateway import responses_call, sse
from specq.gateway.answers import Events, Head, speculation, usage
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError
from specq.gateway.responses_answer import Responses
from specq.gateway.shapes import ChatShape, CompletionShape
from specq.testing.fake_broker import CODEC
from specq.testing.tokenizer import sentencepiece_files
from specq.text import TextCodec
from tests.each import each

SENTENCEPIECE = TextCodec(sentencepiece_files())
HEAD = Head("chatcmpl-1", 0, "m", "f")


def result(text, index=0, cached=0):
    stats = {"rounds": 2, "draft_tokens": 4, "accepted_tokens": 1, "seed": index}
    counts = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": cached}
    return Result(1, "p", text, finish_reason="stop", usage=counts, stats=stats)


def pieces(known=(0, 0)):
    """Two completions whose tokens are letters, the last of each held back; as a client yields them from a position."""
    for place in range(4):
        for index, text in enumerate(("abcd", "wxyz")):
            if place >= known[index]:
                yield Piece(text[place] if place < 3 else "", (place,), (False,), index=index)
    for index, text in enumerate(("abcd", "wxyz")):
        yield Piece(text[3], result=result(text, index), index=index)


def stream(event_id=""):
    """Return the events of a stream from a position, each with its id and data."""
    call = Call({}, stream=True, include_usage=True, n=2)
    position = sse.read_position(event_id, 2) if event_id else sse.start(2)
    events = Events(call, ChatShape(CODEC, -1), HEAD, position, with_ids=True)
    data = events.opening() + b"".join(map(events.take, pieces(position.known))) + events.closing()
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines.get("id", ""), lines["data"]))
    return found


def joined(events):
    texts, ends, roles = {0: "", 1: ""}, [], []
    for _, data in events:
        for choice in orjson.loads(data)["choices"] if data != "[DONE]" else ():
            texts[choice["index"]] += choice["delta"].get("content", "")
            roles += [choice["index"]] if "role" in choice["delta"] else []
            ends += [choice["index"]] if choice["finish_reason"] else []
    return texts, sorted(ends), sorted(roles)


def test_a_whole_stream():
    events = stream()

    assert joined(events) == ({0: "abcd", 1: "wxyz"}, [0, 1], [0, 1])
    assert events[-1] == ("", "[DONE]")
    assert orjson.loads(events[-2][1])["usage"]["completion_tokens"] == 4


@each("cut", range(1, 12))
def test_a_stream_goes_on_after_any_event(cut):
    """What came up to an event, and what comes after its id, is what comes without a break."""
    whole = stream()
    before = whole[:cut]
    after = stream(before[-1][0])

    assert [data for _, data in before + after] == [data for _, data in whole]


@each("event_id", ["x", "0", "1,2,3", "1,-1", "1,2;v", "1e,2ee", "1,2;u;u", "9" * 11 + ",1", ","])
def test_invalid_positions_are_refused(event_id):
    with pytest.raises(ApiError, match="Last-Event-ID"):
        sse.read_position(event_id, 2)


@each("event_id", ["-,-", "0,-", "12,7e", "3e,4e;u"])
def test_positions_are_read_as_they_are_written(event_id):
    assert str(sse.read_position(event_id, 2)) == event_id


def test_tokens_without_a_text_yet_are_no_event():
    events = Events(Call({}), CompletionShape(CODEC, -1), HEAD, sse.start(1), with_ids=True)

    assert events.take(Piece("", (1, 2), (False, False))) == b""
    assert b"id: 3\n" in events.take(Piece("a", (3,), (False,)))


def test_usage_so_far_is_in_each_chunk_of_its_choice():
    """As vLLM counts: the tokens of this chunk's choice; the whole comes at the end."""
    call = Call({}, stream=True, include_usage=True, continuous_usage=True, n=2)
    head = Head("chatcmpl-1", 0, "m", "f", prompt_tokens=(3,))
    events = Events(call, ChatShape(CODEC, -1), head, sse.start(2), with_ids=False)
    data = events.opening() + b"".join(map(events.take, pieces())) + events.closing()
    *chunks, last = [orjson.loads(block[6:]) for block in data.split(b"\n\n")[:-2]]
    counted = {index: [one["usage"] for one in chunks if one["choices"][0]["index"] == index] for index in range(2)}

    for one in counted.values():
        assert [usage["completion_tokens"] for usage in one] == [0, 1, 2, 3, 4]
        assert all(usage["prompt_tokens"] == 3 for usage in one)
        assert all(usage["total_tokens"] == 3 + usage["completion_tokens"] for usage in one)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3 + 4)


def test_a_response_lists_log_probabilities_where_it_is_asked_for_them():
    """In its events, at their end, and in the whole: the same ones, in the form of chats."""
    entries = tuple({"token_id": token, "logprob": -0.5, "top": [[token, -0.5], [6, -1.0]]} for token in (5, 7))
    asked = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    call, shape, head = responses_call.read(asked), ChatShape(CODEC, 2), Head("resp_1", 0, "m", "f")
    ended = replace(result("ab"), logprobs=entries)
    events = Responses(call, shape).events(head, sse.start(1), with_ids=False)
    given = [Piece("ab", (5,), (False,), logprobs=entries[:1]), Piece("", (7,), (False,), logprobs=entries[1:])]
    data = events.opening() + b"".join(map(events.take, [*given, Piece("", result=ended)])) + events.closing()
    said = [orjson.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]
    whole = Responses(call, shape).whole(head, [ended])["output"][0]

    expected = shape.logprobs(entries)["content"]
    streamed = [one for event in said if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    done = next(event for event in said if event["type"] == "response.output_text.done")
    assert [one["logprob"] for one in expected[0]["top_logprobs"]] == [-0.5, -1.0]
    assert streamed == done["logprobs"] == whole["content"][0]["logprobs"] == expected
    assert said[-1]["response"]["output"][0] == whole
    assert (call.arguments["logprobs"], whole["id"]) == (2, "msg_1")


def test_log_probabilities_of_both_kinds():
    """What JSON cannot say is -9999; offsets are those of the pieces."""
    entries = ({"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, float("-inf")]], "offset": 7},) * 2
    text = CODEC.decode([5], skip_special=False)
    chat = ChatShape(CODEC, 2).chunk(0, Piece("ab", (5, 5), logprobs=entries))["logprobs"]["content"]
    shape = CompletionShape(CODEC, 2)
    first, second = (shape.chunk(0, Piece("ab", (5, 5), logprobs=entries))["logprobs"] for _ in range(2))

    assert (chat[0]["token"], chat[0]["bytes"]) == (text, list(text.encode()))
    assert [one["logprob"] for one in chat[1]["top_logprobs"]] == [-0.5, -9999.0]
    assert first["tokens"] == [text, text]
    assert first["text_offset"] == second["text_offset"] == [7, 7]
    assert list(first["top_logprobs"][0].values()) == [-0.5, -9999.0]


def test_likeliest_tokens_never_merge():
    """Ids distinguish equal texts. The sampled token keeps its text."""
    for codec, alike, text in ((SENTENCEPIECE, ("<0x61>", "a"), "a"), (CODEC, ("\u00f0", "\u0141"), "\ufffd")):
        first, second = (codec.token_id(token) for token in alike)
        top = [[first, -0.5], [second, -1.0]]
        entry = {"token_id": second, "logprob": -1.0, "top": top, "offset": 0}
        shape = CompletionShape(codec, 2)
        shown = shape.whole(0, replace(result(""), logprobs=[entry, {**entry, "top": []}]))["logprobs"]
        assert shown["tokens"] == [text, text]
        assert shown["top_logprobs"] == [{f"token_id:{first}": -0.5, text: -1.0}, {text: -1.0}]  # `logprobs: 0`
        (chat,) = ChatShape(codec, 2).whole(0, replace(result(""), logprobs=[entry]))["logprobs"]["content"]
        assert [bytes(one["bytes"]) for one in chat["top_logprobs"]] == [codec.tokens[i].data for i, _ in top]


def test_what_was_cached_is_what_the_first_completion_of_each_prompt_found():
    """The others find what that one computed, whichever of them was first."""
    results = [result("a", cached=count) for count in (2, 0, 1, 2)]

    assert usage(Call({}, num_prompts=2, n=2), results)["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage(Call({}, num_prompts=4), results)["prompt_tokens_details"] == {"cached_tokens": 5}


def test_the_numbers_count_each_prompt_once():
    """Two prompts with two completions each."""
    counted = usage(Call({}, num_prompts=2, n=2), [result("a")] * 4)

    assert (counted["prompt_tokens"], counted["completion_tokens"], counted["total_tokens"]) == (6, 8, 14)
    assert counted["speculation"]["acceptance_rate"] == 0.25
    assert counted["prompt_tokens_details"] == {"cached_tokens": 0}
    assert speculation([])["mean_accepted_length"] == 0.0

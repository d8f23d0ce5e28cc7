"""Answers as their parts: what is reasoning, content and a call, wherever the text is cut into pieces."""

from dataclasses import replace

from specq.gateway.parts import (
    MAY_THINK,
    THINKS,
    CallArguments,
    CallBegun,
    CallCut,
    CallEnded,
    ContentText,
    PartsForm,
    PartSplitter,
    ReasoningText,
    ToolCall,
    split,
)
from tests.each import each


def form(calls, thinks=""):
    return PartsForm(calls, frozenset({"f", "g"}), thinks, key="7")


HERMES, LLAMA, MISTRAL = form("hermes"), form("llama3_json"), form("mistral")
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>'
CASES = [  # form, text, reasoning, content, calls as (name, arguments)
    (HERMES, ONE, "", "", [("f", '{"a": "}\\"{"}')]),
    (HERMES, f"Wait.\n\n{ONE}\n{ONE}\n", "", "Wait.", [("f", '{"a": "}\\"{"}')] * 2),
    (HERMES, '<tool_call>{"arguments": {"x": [1]}, "name": "g"}', "", "", [("g", '{"x": [1]}')]),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>', "", "", [("g", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call> Done.', "", "Done.", [("f", "{}")]),
    (HERMES, '<tool_call><tool_call>{"name": "f"}', "", "<tool_call>", [("f", "{}")]),
    (HERMES, ONE[:-3], "", "", [("f", '{"a": "}\\"{"}')]),
    (form("general"), ONE, "", "", [("f", '{"a": "}\\"{"}')]),
    (LLAMA, ' {"name": "f", "parameters": {"a": 1}}', "", "", [("f", '{"a": 1}')]),
    (
        LLAMA,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}; x',
        "",
        "; x",
        [("f", "{}"), ("g", "{}")],
    ),
    (MISTRAL, 'A [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "x"}]', "", "A", [("f", "{}")]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": []}}]',
        "",
        "",
        [("f", "{}"), ("g", '{"a": []}')],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]12[ARGS]{"a": 2}',
        "",
        "",
        [("f", '{"a": 1}'), ("g", '{"a": 2}')],
    ),
    (form("", THINKS), "I\n think </thin\n</think>\n\nYes.\n", "I\n think </thin", "Yes.\n", []),
    (form("", THINKS), "\n<think>Hm", "Hm", "", []),
    (form("", MAY_THINK), " <think>\nHm\n</think>\n\nYes.", "Hm", "Yes.", []),
    (form("", MAY_THINK), "\n <thin Yes.", "", "\n <thin Yes.", []),
    (form("hermes", MAY_THINK), f"<think>{ONE}</think>{ONE}", ONE, "", [("f", '{"a": "}\\"{"}')]),
]
NO_CALLS = [  # what looks like a call and is none stays as it is
    (HERMES, f"  <tool_call>{text}</tool_call> b")
    for text in (
        'h", "arguments": {}}',
        '{"name": "h", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "x"}',
        '{"arguments": {}}',
        '{"name": "f", "name": "f"}',
        '{"name": "f", "other": {}}',
        '{"name": "f",}',
        '{"arguments": {}, "parameters": {}, "name": "f"}',
    )
]
NO_CALLS += [
    (HERMES, '<tool_call>\n{"name": "f'),
    (HERMES, "1 <tool_call"),
    (HERMES, "<tool_call><tool_call"),
    (LLAMA, '{"answer": 4}'),
    (LLAMA, 'See: {"name": "f", "parameters": {}}'),
    (LLAMA, "<|python_tag|>print()"),
    (MISTRAL, "[TOOL_CALLS]h[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS][1]"),
    (MISTRAL, "[TOOL_CALLS]f"),
    (HERMES, "a  \n"),
    (HERMES, " " * 99 + "<tool_call>"),
]
CUT = [  # begun, and not completed
    (HERMES, ' <tool_call>{"name": "f", "arguments": {"a": 1', '{"a": 1', ""),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1} x', '{"a": 1}', "x"),
    (HERMES, '<tool_call>{"name": "f", "arguments": {a}} b', "{a", "}} b"),
    (MISTRAL, "[TOOL_CALLS]f[ARGS]{", "{", ""),
]


def joined(parts):
    """Return the parts with neighbouring texts of one kind in one."""
    found = []
    for part in parts:
        last = found[-1] if found else None
        if type(part) is type(last) and isinstance(part, (ReasoningText, ContentText, CallArguments)):
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return found


def pieces(of, *texts):
    splitter = PartSplitter(of)
    return [part for text in texts for part in splitter.push(text)], splitter.finish(), splitter.num_calls


@each(("of", "text", "reasoning", "content", "calls"), CASES)
def test_a_whole_answer(of, text, reasoning, content, calls):
    answer = split(of, text)

    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert len({call.call_id for call in answer.calls}) == len(calls)


@each(("of", "text"), NO_CALLS)
def test_what_is_no_call_stays_content(of, text):
    answer = split(of, text)

    assert (answer.content, answer.calls) == (text, ())
    assert all(isinstance(part, ContentText) for part in PartSplitter(of).push(text))


@each(("of", "text", "arguments", "after"), CUT)
def test_a_call_that_is_cut(of, text, arguments, after):
    """A stream has told of it; a whole answer has its text."""
    before, last, num_calls = pieces(of, text)
    begun, told, cut, *rest = before + last

    assert (begun.name, told, cut) == ("f", CallArguments(0, arguments), CallCut(0, text.removesuffix(after)))
    assert "".join(part.text for part in rest) == after
    assert num_calls == 0
    assert (split(of, text).content, split(of, text).calls) == (text, ())


ALL = [(of, text) for of, text, *_ in (*CASES, *NO_CALLS, *CUT)]


@each(("of", "text"), ALL)
def test_pieces_do_not_matter(of, text):
    """Neither for all parts nor for those that are certain at a cut."""
    whole, last, _ = pieces(of, text)
    by_one, certain = PartSplitter(of), []
    for place, char in enumerate(text, 1):
        certain = joined([*certain, *by_one.push(char)])
        cut = PartSplitter(of)
        before = cut.push(text[:place])
        after = cut.push(text[place:])
        assert joined(before) == certain
        assert (joined(before + after), cut.finish()) == (joined(whole), last)
    assert by_one.finish() == last


def test_arguments_come_early_and_the_end_once():
    parts, _, _ = pieces(HERMES, '<tool_call>{"name": "f", "arguments": {"a', '": 1}', "}</tool_call>")

    call_id = HERMES.call_id(0, 0)
    assert parts == [CallBegun(0, call_id, "f"), CallArguments(0, '{"a'), CallArguments(0, '": 1}'), CallEnded(0)]


def test_ids():
    """The same for the same answer; in Mistral's form those that its templates require."""
    ids = [PartsForm("hermes", key=key).call_id(*at) for key in "ab" for at in ((0, 0), (0, 1), (1, 0))]
    short = MISTRAL.call_id(0, 0)

    assert len(set(ids)) == 6
    assert (len(short), short.isalnum()) == (9, True)
    assert split(HERMES, ONE, 3).calls == (ToolCall(HERMES.call_id(3, 0), "f", '{"a": "}\\"{"}'),)


def test_a_long_answer():
    """It has marks and white space in plenty, none of which belongs to a call."""
    text = "x" * 9000 + " " * 9000 + "<tool_call>{" * 900
    answer = split(HERMES, text + '<tool_call>{"name": "f", "arguments": {"a": "' + "y" * 9000 + '"}}')

    assert (answer.content, len(answer.calls[0].arguments)) == (text, 9009)

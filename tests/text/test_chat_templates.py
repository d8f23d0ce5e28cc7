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
from specq.protocol import ConfigError, JobError
from specq.testing.tokenizer import tokenizer_json
from specq.text import TextCodec, load_tokenizer_files, template_limits
from specq.text import messages as ours
from specq.text.messages import normalised
from specq.text.template_limits import SIZE_LIMIT
from tests.text.conversations import CONVERSATIONS, NORMALISED, TOOLS, USER, call, calling

TEMPLATES = {
    path.stem: path.read_text("utf-8") for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
LISTS = {"default and tool_use": {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["hermes"]}}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|endoftext|>"}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "documents": [{"text": "Köln"}], "add_generation_prompt": False, "enable_thinking": False}
    | {"reasoning_effort": "low", "tools_in_user_message": False, "date_string": "1 May", "eos_token": "<e>"},
]
FROZEN = datetime(2026, 2, 3, 4, 5, 6)  # noqa: DTZ001 - local time, as templates see it
REFUSED = "refused"

# Where specq and transformers differ on purpose. Each pair is a template, and what transformers says of it.
# deepseek_r1 adds arguments to a text, so it wants the JSON text: specq gives that, transformers an object.
INTENDED = {"deepseek_r1": 'can only concatenate str (not "dict") to str'}


@pytest.fixture(autouse=True)
def _frozen(monkeypatch):
    """Stop the clock of both."""
    monkeypatch.setattr(ours, "now", lambda: FROZEN)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: FROZEN))


def codec_of(template: Any, **named: Any) -> TextCodec:
    entries = (
        [{"name": name, "template": text} for name, text in template.items()]
        if isinstance(template, dict)
        else template
    )
    config = {"chat_template": entries, **NAMED, **named}
    return TextCodec({"tokenizer.json": tokenizer_json(), "tokenizer_config.json": json.dumps(config)})


def theirs_of(template: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json()), chat_template=template, **NAMED
    )


def attempt(render: Any, messages: list[Any], variables: dict[str, Any]) -> tuple[str, str]:
    """Return what is rendered, or "refused" and the reason."""
    try:
        return "", render(messages, **{"add_generation_prompt": True, **variables})
    except Exception as error:
        if render.__name__ == "render_chat" and type(error) is not JobError:
            raise
        return REFUSED, str(error)  # transformers passes on any error of a template


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
    forms = {title: normalised(messages) for title, messages in CONVERSATIONS.items()}
    for name, template in (TEMPLATES | LISTS).items():
        codec, theirs = codec_of(template), theirs_of(template)
        for variables in VARIABLES:
            for title, messages in CONVERSATIONS.items():
                found = attempt(codec.render_chat, messages, variables)
                wanted = attempt(
                    lambda *args, _theirs=theirs, **given: _theirs.apply_chat_template(*args, tokenize=False, **given),
                    forms[title],
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


def test_the_last_message_is_left_open_as_transformers_leaves_it():
    """In all templates that show it, with spaces at its end, after a question and alone."""
    num_open, refused = 0, set()
    for name, template in TEMPLATES.items():
        codec, theirs = codec_of(template), theirs_of(template)
        for said in ("Well", "Well, ", " Well,\n", "It is:\n\n1. "):
            messages = [USER, {"role": "assistant", "content": said}]
            try:
                wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
            except Exception:  # noqa: BLE001 - a template may raise any error
                refused.add(name)
                continue
            assert codec.render_open_chat(messages) == wanted, (name, said)
            assert wanted.rstrip().endswith(said.strip()), (name, said)
            num_open += 1
    assert num_open > 60
    assert len(refused) < 5, "templates that show no such message, or only parts"


def test_a_message_that_cannot_be_continued_is_refused():
    codec = codec_of(TEMPLATES["chatml"])
    for messages in ([], [USER, {"role": "assistant", "tool_calls": [{}]}], "Hi", [USER, 5]):
        with pytest.raises(JobError, match=r"continue_final_message|messages"):
            codec.render_open_chat(messages)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="cannot both be true"):
        codec.render_open_chat([USER], add_generation_prompt=True)
    with pytest.raises(JobError, match="does not show the last message"):
        codec_of("{{ messages[0].content }}").render_open_chat([USER, {"role": "assistant", "content": "Well"}])


def test_arguments_that_are_added_to_a_text_are_the_text_that_was_sent():
    codec = codec_of(TEMPLATES["deepseek_r1"])
    given = '{"city" : "K"}'
    said = codec.render_chat([USER, calling(call(given, name="f"))])
    assert f"<|tool▁sep|>f\n```json\n{given}\n```" in said
    assert "None" not in said


def test_a_template_that_shows_only_parts_gets_the_text_as_a_part():
    """Another intended difference: transformers shows nothing of a text here."""
    template = '{{ bos_token + "" }}'
    one_by_one = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    template += "{% for m in messages %}<" + one_by_one + ">{% endfor %}"
    codec, theirs = codec_of(template), theirs_of(template)
    for messages in CONVERSATIONS.values():
        in_parts = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in normalised(messages)]
        assert codec.render_chat(messages) == theirs.apply_chat_template(in_parts, tokenize=False)
    assert codec_of(template.replace("m.content", "m.parts")).render_chat([USER]) == "<s><>"


def test_the_bundled_models_own_templates():
    for model in ("tiny", "smollm2"):
        try:
            files = load_tokenizer_files(resolve_model(model, "target"))
        except ConfigError:  # its package is not installed here
            continue
        config = json.loads(files["tokenizer_config.json"])
        codec, theirs = TextCodec(files), theirs_of(files.get("chat_template.jinja") or config["chat_template"])
        for messages in CONVERSATIONS.values():
            wanted = theirs.apply_chat_template(normalised(messages), tokenize=False, add_generation_prompt=True)
            assert codec.render_chat(messages) == wanted


# --- limits -----------------------------------------------------------------------------------------------------------


def loop(body: str) -> str:
    return "{% for a in range(99999) %}{% for b in range(99999) %}" + body + "{% endfor %}{% endfor %}"


LONG = "{% set s = 'ab ' * 999999 %}"

ENDLESS = {  # would run for minutes, or use all memory
    "loops": loop(""),
    "loops that print": loop("x"),
    "loops into a block": "{% set t %}" + loop("x" * 999) + "{% endset %}",
    "a loop that calls itself": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 30 }}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(30) }}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a text times a number": "{{ ('a' * 10 ** 10) | length }}",
    "a list times a number": "{{ ([1] * 10 ** 10) | length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers of powers": "{% set n = namespace(x=9 ** 99) %}" + loop("{% set n.x = n.x * n.x %}"),
    "doubling by +": "{% set n = namespace(x='ab') %}" + loop("{% set n.x = n.x + n.x %}"),
    "doubling by ~": "{% set n = namespace(x='ab') %}" + loop("{% set n.x = n.x ~ n.x %}"),
    "doubling by a format": "{% set n = namespace(x='ab') %}" + loop("{% set n.x = '%s%s' % (n.x, n.x) %}"),
    "doubling by a block": "{% set n = namespace(x='ab') %}"
    + loop("{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}"),
    "a tree of lists": "{% set n = namespace(x=[1]) %}" + loop("{% set n.x = [n.x, n.x] %}"),
    "a tree of objects": "{% set n = namespace(x=[1]) %}" + loop("{% set n.x = {'a': n.x, 'b': n.x} %}"),
    "trees that are compared": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "a tree by dict": "{% set n = namespace(x=[1]) %}" + loop("{% set n.x = dict(a=n.x, b=n.x) %}"),
    "a tree by arguments": "{% macro f(n) %}{{ f(n - 1, varargs, varargs) if n }}{% endmacro %}{{ f(90, 1) }}",
    "a tree by batch": "{% set n = namespace(x=[1]) %}" + loop("{% set n.x = [n.x] | batch(9, n.x) | list %}"),
    "a width": "{{ '%999999999999d' % 1 }}",
    "a width that is a value": "{{ '%*d' % (99999999999, 1) }}",
    "a width by a method": "{{ '{:>99999999999}'.format('a') }}",
    "a width within a width": "{{ '{:>{w}}'.format('a', w=99999999999) }}",
    "a value many times": "{{ ('%(a)s' * 9999) % {'a': 'b' * 99999} }}",
    "a value many times by a method": "{{ ('{0}' * 9999).format('b' * 99999) }}",
    "a filter's width": "{{ 'a' | center(99999999999) }}",
    "a method's width": "{{ 'a'.ljust(99999999999) }}",
    "zeros": "{{ 'a'.zfill(99999999999) }}",
    "tabs": "{{ '\t'.expandtabs(99999999999) }}",
    "replacing": "{{ (('a' * 99999).replace('a', 'b' * 99999)) | length }}",
    "replacing by a filter": "{{ ('a' * 99999) | replace('', 'b' * 99999) | length }}",
    "joining": "{{ ('a' * 99999).join('b' * 99999) | length }}",
    "joining by a filter": "{{ range(99999) | map('string') | join('b' * 99999) | length }}",
    "an indentation": "{{ 'a\nb' | indent(99999999999) }}",
    "an indentation of JSON": "{{ [1] | tojson(indent=99999999999) }}",
    "batches": "{{ [1] | batch(99999999999, 'x') | list }}",
    "slices": "{{ [1] | slice(99999999999) | list }}",
    "rounding": "{{ 5 | round(-999999999) }}",
    "bytes": "{{ (5).to_bytes(99999999999, 'big') }}",
    "a long template": "{% if 1 %}{% endif %}" * 99999,
    "searches": LONG + "{% if 'zq' in s %}{% endif %}" * 999,
    "comparisons": LONG + "{% set t = s[1:] %}" + "{% if s < t %}{% endif %}" * 999,
    "comparisons of trees": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(12) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{% set x, y = n.x, n.y %}"
    + "{% if x == y %}{% endif %}"
    * 9999,
    "tests": LONG + "{% if s is lower %}{% endif %}" * 999,
    "filters that return numbers": LONG + "{% if s | wordcount %}{% endif %}" * 99,
    "cuts": LONG + "".join("{% set s" + str(i) + " = s[1:] %}" for i in range(999)),
    "a wrapped word": "{{ ('a' * 999999) | wordwrap(1) }}",
    "a long list that is printed": "{{ ([1] * 9999999) | pprint }}",
    "a long number": "{% set x = ('f' * 9999999) | int(0, 16) %}{{ x // 3 ** 9999 }}",
    "a long number by a method": "{% set x = (5).from_bytes(('f' * 9999999).encode(), 'big') %}{{ x // 3 ** 9999 }}",
    "a sum of lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
}


def test_any_template_ends_soon(monkeypatch):
    """In any thread, with an error of the same kind as other refusals, and without much memory."""
    monkeypatch.setattr(template_limits, "TIME_LIMIT_S", 0.02)
    found: dict[str, Any] = {}

    def try_all() -> None:
        for name, template in ENDLESS.items():
            begin = time.thread_time()
            _, reason = attempt(codec_of(template).render_chat, [USER], {})
            found[name] = (reason, time.thread_time() - begin)

    thread = threading.Thread(target=try_all, daemon=True)
    thread.start()
    thread.join(60)
    assert list(found) == list(ENDLESS)
    limits = ("it takes more than 0.02 s", "it makes more than", "it has more than", "Range too big")
    assert {
        name: reason[:99] for name, (reason, _) in found.items() if not any(limit in reason for limit in limits)
    } == {}
    assert {name: seconds for name, (_, seconds) in found.items() if seconds > 2} == {}


def test_a_long_conversation_is_within_the_limits():
    long = [USER | {"content": "x" * 1_000_000}, *[USER, {"role": "assistant", "content": "y" * 100}] * 1000]
    for name in ("qwen3", "llama31", "chatml"):
        said = codec_of(TEMPLATES[name]).render_chat(long, tools=TOOLS * 20)
        assert said.count("y" * 100) == 1000, name
    assert len(said) * 20 < SIZE_LIMIT


def test_a_variable_may_have_any_name():
    said = codec_of("{{ self is defined }}{{ name }}{{ args }}").render_chat([USER], self=1, name=2, args=[3])
    assert said == "True2[3]"


def test_what_templates_raise_is_one_kind_of_error():
    """Any exception of Python: raised by the template, by a mistake in it, or at compile time."""
    mistakes = [
        *("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ [][5].x }}", "{{ 'a' + 1 }}", "{{ x | nothing }}"),
        *("{{ ''.__class__.mro() }}", "{% include 'x' %}", "{% for %}"),
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 5 | int(base=1, default='a') | tojson(indent='x', x=1) }}",
    ]
    for template in mistakes:
        with pytest.raises(JobError, match=r"^the chat template refuses the messages: .") as refused:
            codec_of(template).render_chat([USER])
        assert refused.value.code == "invalid", template

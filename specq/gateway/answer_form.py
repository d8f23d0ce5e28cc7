"""What a request's answer may hold: calls of its tools, reasoning. The chat template and the prompt decide it; pure.

`read_chat` returns the requests of a chat for the client, and the `PartsForm` with which their texts are split:

- tools: the conversation as the template takes it, and the grammar of calls (`tool_prompt`, `tool_forms`).
- reasoning: where the prompt ends with an open `<think>`, the text begins with reasoning. Where the template has this
  mark somewhere, and the prompt does not end with `</think>`, it may. A grammar begins behind the reasoning. It also
  limits the reasoning, so a request with a budget has one.
- special tokens: the text shows all that the form needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specq.client import Request, ServedModel, read_requests
from specq.gateway.call_text import CALL_FORMS
from specq.gateway.chat_call import BUDGET
from specq.gateway.parts import END_OF_THINK, MAY_THINK, THINK, THINKS, PartsForm
from specq.gateway.tool_fields import ToolUse
from specq.gateway.tool_forms import choose_form, general_messages, knows_tools, mistral_messages, tool_grammar
from specq.protocol import MAX_WITHIN, JobError, SamplingParams, grammar_text
from specq.text import TextCodec

_TEMPLATE = "chat_template_kwargs"


def read_chat(
    arguments: Mapping[str, Any], served: ServedModel, use: ToolUse, budget: int = -1
) -> tuple[list[Request], PartsForm]:
    """Return the requests and the form of their answers; raise JobError as `read_requests` does.

    budget  the most tokens of the reasoning; -1: not limited.
    """
    template = served.codec.chat_template(with_tools=bool(use.tools))
    calls = (use.form or choose_form(template)) if use.tools else ""
    given = tool_arguments(arguments, use, calls, served.codec, template) if calls else dict(arguments)
    requests = read_requests(given, served)
    form = PartsForm(
        calls=calls if use.functions else "",
        names=frozenset(function.name for function in use.functions),
        thinks=_thinks(template, requests[0].prompt),
        key=f"{requests[0].submits[0].job_id:016x}",
    )
    if budget >= 0:
        _check_budget(template, form, served.codec)
    return [_formed(request, form, served.codec, budget) for request in requests], form


def tool_arguments(
    arguments: Mapping[str, Any], use: ToolUse, calls: str, codec: TextCodec, template: str
) -> dict[str, Any]:
    """Return the arguments of a chat with tools: its messages, the template's variables and the grammar of calls.

    calls  the form of calls.
    """
    messages, variables = arguments["messages"], dict(arguments.get(_TEMPLATE) or {})
    if calls == "general" and (use.functions or not knows_tools(template)):
        variables.pop("tools", None)
        messages = general_messages(messages, use.tools if use.functions else (), codec)
    elif calls == "mistral":
        messages = mistral_messages(messages)
    grammar = {"grammar": tool_grammar(use, calls, template, arguments.get("grammar"))} if use.functions else {}
    return {**arguments, "messages": messages, _TEMPLATE: variables, **grammar}


def _thinks(template: str, prompt: str) -> str:
    """Return whether the answer begins with reasoning, as in `PartsForm`."""
    end = prompt.rstrip()
    if end.endswith(THINK):
        return THINKS
    return MAY_THINK if _has_marks(template) and not end.endswith(END_OF_THINK) else ""


def _has_marks(template: str) -> bool:
    return THINK in template or END_OF_THINK in template


def _check_budget(template: str, form: PartsForm, codec: TextCodec) -> None:
    """Raise JobError if the model cannot think, or its thoughts cannot be counted."""
    reason = "" if form.thinks or _has_marks(template) else f"the chat template of this model has no {THINK}"
    for mark in (END_OF_THINK, *((THINK,) if form.thinks == MAY_THINK else ())):
        if form.thinks and mark not in codec.tokens.special and len(codec.encode_part(mark)) != 1:
            reason = f"the tokenizer of this model has no token {mark}"
    if reason:
        raise JobError(f"{reason}, so its thinking cannot have a budget; leave it out", field=BUDGET)


def _formed(request: Request, form: PartsForm, codec: TextCodec, budget: int) -> Request:
    """Return a request whose text shows the marks of the form, and whose grammar begins behind the reasoning."""
    calls = CALL_FORMS[form.calls]
    marks = {*calls.marks, *calls.inner, *((THINK, END_OF_THINK) if form.thinks else ())}
    submits = tuple(replace(submit, params=_behind(submit.params, form.thinks, budget)) for submit in request.submits)
    return replace(request, submits=submits, text=replace(request.text, shown=codec.tokens.special & marks))


def _behind(params: SamplingParams, thinks: str, budget: int) -> SamplingParams:
    """Return parameters whose grammar, if there is any, begins behind the reasoning and limits it."""
    limit = {"within": min(budget, MAX_WITHIN)} if budget >= 0 else {}
    if not thinks or not (params.grammar or limit):
        return params
    grammar = json.loads(params.grammar or '{"any": true}')
    marks = {"after": END_OF_THINK, **({"opens": THINK} if thinks == MAY_THINK else {})}
    return replace(params, grammar=grammar_text({**({} if "after" in grammar else marks), **limit, **grammar}))

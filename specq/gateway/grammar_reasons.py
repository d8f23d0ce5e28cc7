"""Why a grammar was refused, in the words of the request that asked for it; pure.

The client and the verifier know only the job's argument `grammar`. The request may have asked for it in another field,
or with tools. Places are those of `specq.grammar.place`: a JSON pointer, with the name of the schema if there are
several.
"""

from __future__ import annotations

import re

from specq.gateway.grammar_fields import FieldGrammar
from specq.gateway.tool_fields import Function, ToolUse
from specq.gateway.tool_forms import DEFINITION
from specq.protocol import STRICT_ADVICE, JobError, is_about_grammar

_ARGUMENT = "grammar"
_SCHEMA = re.compile(  # one of several
    rf", at (?:(?:structures\[0\]\.schema)?#/\$defs/{re.escape(DEFINITION)}(\d+)"
    r"|structures\[(\d+)\]\.schema#|otherwise#)"
)


def in_words_of_request(error: JobError, chosen: FieldGrammar, tools: ToolUse) -> JobError:
    """Return an error about a job's grammar with the field of the request that it is about; any other unchanged."""
    is_unnamed = not error.field and error.code == "invalid" and is_about_grammar(str(error))
    if not is_unnamed and error.field != _ARGUMENT:
        return error
    function, reason = _function_of(str(error), tools)
    if function is not None:
        return JobError(f"{function.place} ({function.name}): {_plain(reason)}", error.code, "tools")
    if tools.functions and not chosen.field:
        return JobError(f"tools: {_plain(reason)}", error.code, "tools")
    if not chosen.may_be_loose:
        reason = reason.replace(STRICT_ADVICE, "; leave this out")
    if chosen.field not in ("", _ARGUMENT):
        reason = f"{chosen.field}: {_plain(reason)}"
    return JobError(reason, error.code, chosen.field or _ARGUMENT)


def _function_of(reason: str, tools: ToolUse) -> tuple[Function | None, str]:
    """Return the function whose schema a place is in, if any, and the reason with the place within that schema.

    The schemas of all forms of calls are in the order of the functions (`specq.gateway.tool_forms`).
    """
    found = _SCHEMA.search(reason)
    if not tools.functions or found is None:
        return None, reason
    reason = f"{reason[: found.start()]}, at #{reason[found.end() :]}"
    definition, structure = found.groups()
    if structure is not None:
        return tools.functions[int(structure) % len(tools.functions)], reason
    at = len(tools.functions) if definition is None else int(definition)
    return (tools.functions[at] if at < len(tools.functions) else None), reason


def _plain(reason: str) -> str:
    """Return a reason behind the name of a field."""
    if reason.startswith("grammar: "):
        return reason.removeprefix("grammar: ")
    return f"its {reason}" if reason.startswith("grammar ") else reason

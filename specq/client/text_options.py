"""The options of a call that concern its prompt's tokens and the text of its answer, under vLLM's names.

    truncate_prompt_tokens   most tokens of the prompt; -1: as many as leave room for one token
    truncation_side          "left" keeps the last tokens, "right" the first ones
    continue_final_message   the last message of a chat is continued, and not ended
    skip_special_tokens      whether special tokens are left out of the text
    include_stop_str_in_output   whether the text keeps the stop string that ended it

Rule: the broker does not know them. They change the prompt before a job is sent, or the text of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specq.protocol import JobError, shown

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Checked options; `truncate_prompt_tokens` 0 means no limit.

    shown  special tokens that the text shows even if it shows no others. The gateway sets them, not the caller.
    """

    truncate_prompt_tokens: int = 0
    truncation_side: str = LEFT
    continue_final_message: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    shown: frozenset[str] = frozenset()

    def truncated(self, token_ids: Sequence[int], context_length: int) -> Sequence[int]:
        """Return the tokens of a prompt within the limit. Raises JobError for a limit that the model exceeds."""
        most = self.truncate_prompt_tokens
        if most >= context_length:
            reason = f"truncate_prompt_tokens is {most}, but must be below the {context_length} tokens of the model"
            raise JobError(reason, field="truncate_prompt_tokens")
        most = context_length - 1 if most < 0 else most
        if not most or len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if self.truncation_side == RIGHT else token_ids[-most:]


TEXT_OPTIONS = tuple(field.name for field in fields(TextOptions) if field.name != "shown")


def read_text_options(values: dict[str, Any]) -> TextOptions:
    """Return the options among the arguments of a call."""
    given = {name: values[name] for name in TEXT_OPTIONS if values.get(name) is not None}
    for name, value in given.items():
        if name not in ("truncate_prompt_tokens", "truncation_side") and type(value) is not bool:
            raise JobError(f"{name} is {shown(value)}, but must be true or false", field=name)
    most, side = given.get("truncate_prompt_tokens", 0), given.get("truncation_side", LEFT)
    if "truncate_prompt_tokens" in given and (type(most) is not int or most < -1 or not most):
        reason = f"truncate_prompt_tokens is {shown(most)}, but must be -1 or a whole number of at least 1"
        raise JobError(reason, field="truncate_prompt_tokens")
    if side not in (LEFT, RIGHT):
        raise JobError(f"truncation_side is {shown(side)}, but must be left or right", field="truncation_side")
    return TextOptions(**given)

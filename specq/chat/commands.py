"""Lines that begin with a slash: what is set for the answers to come, and what is done at once.

To add one: its line in `COMMANDS`, and a function that takes the chat's settings and what stands behind the name. It
returns what to show. Values are checked as those of every request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specq.chat.conversation import Conversation
from specq.client import check_values
from specq.protocol import JobError

OFF = "none"  # takes a value back
MOST_TOKENS = 512  # of an answer, where nobody says otherwise: the 128 of other jobs would cut many


@dataclass(slots=True)
class ChatSettings:
    """What the next answers are made with. `parameters` as of `specq.Client.generate`."""

    parameters: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    ended: bool = False

    def set(self, name: str, value: Any) -> None:
        """Set a parameter, or take it back with None; raises JobError for a value that is refused, and then keeps the
        old one."""
        changed = {key: old for key, old in self.parameters.items() if key != name}
        changed |= {} if value is None else {name: value}
        check_values(changed)
        self.parameters = changed


def run_command(line: str, settings: ChatSettings) -> str:
    """Do what a line with a slash asks for; return what to show. Raises JobError for what is unknown or refused."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        known = ", ".join(f"/{known}" for known in COMMANDS)
        raise JobError(
            f"unknown command /{name}; known are {known} (a message may begin with a slash if a space comes before it)"
        )
    return command.run(settings, rest.strip())


def _help(_settings: ChatSettings, _rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    return "\n".join(
        [
            *(f"  {command.usage:{width}}  {command.text}" for command in COMMANDS.values()),
            '  """ begins and ends a message of several lines; so does a \\ at the end of each line but the last.',
            "  Ctrl-C stops an answer, which stays as far as it came; Ctrl-D ends the chat.",
        ]
    )


def _system(settings: ChatSettings, text: str) -> str:
    if text:
        settings.conversation.system = "" if text == OFF else text
    return f"system: {settings.conversation.system or 'as the template says'}"


def _reset(settings: ChatSettings, _rest: str) -> str:
    settings.conversation.turns.clear()
    return "the conversation begins anew"


def _quit(settings: ChatSettings, _rest: str) -> str:
    settings.ended = True
    return ""


def _parameter(name: str, read: type, unset: str, default: Any = None) -> Callable[[ChatSettings, str], str]:
    """Return the command that sets a parameter, or shows it where no value is given; `unset`: what holds without one.

    `default` is what it is set to when it is taken back; None: left out.
    """

    def run(settings: ChatSettings, text: str) -> str:
        if text:
            settings.set(name, default if text == OFF else _read(name, read, text))
        return f"{name}: {settings.parameters.get(name, unset)}"

    return run


def _read(name: str, read: type, text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        kind = "a whole number" if read is int else "a number"
        raise JobError(f"{name} is {text!r}; it must be {kind}, or {OFF}") from None


class Command(NamedTuple):
    """How a command is written, what it does, and the function that does it."""

    usage: str
    text: str
    run: Callable[[ChatSettings, str], str]


COMMANDS = {
    "help": Command("/help", "this list", _help),
    "system": Command("/system TEXT", f"what the model shall be; {OFF}: as its template says", _system),
    "reset": Command("/reset", "forget the conversation", _reset),
    "temp": Command("/temp X", "temperature; 0 is greedy", _parameter("temperature", float, "0 (greedy)")),
    "seed": Command("/seed N", f"the same seed gives the same text; {OFF}: drawn", _parameter("seed", int, "drawn")),
    "mode": Command("/mode MODE", "async, sync, or plain: without any speculation", _parameter("mode", str, "async")),
    "max": Command("/max N", "most tokens of an answer", _parameter("max_tokens", int, "128", MOST_TOKENS)),
    "quit": Command("/quit", "end the chat", _quit),
}
ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "clear": "reset", "temperature": "temp"}

"""A conversation with a model that is served: questions, commands, answers.

Rule: Ctrl-C stops the answer and not the chat; what came of the answer stays in the conversation, as it stays on the
screen. What fails costs the question that it was for.

What was said so far, as messages for a chat template; the oldest turns go where the model's context is too short.

Lines that begin with a slash: what is set for the answers to come, and what is done at once.

To add one: its line in `COMMANDS`, and a function that takes the chat's settings and what stands behind the name. It
returns what to show. Values are checked as those of every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from specq.chat.pen import Pen, summary
from specq.chat.reading import ReadLine, read_message
from specq.client import AsyncClient, Result, ServedModel, check_values
from specq.protocol import JobError

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Conversation:
    """Turns of a question and its answer, and what the model shall be (`system`; "": as its template says)."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> Messages:
        """Return all of it with one more question."""
        said: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": question}]

    def fit(self, question: str, encode: Callable[[Messages], Sequence[int]], limit: int) -> int:
        """Drop the oldest turns until the messages have at most `limit` tokens, or no turn is left; return how many
        went."""
        num_turns = len(self.turns)
        while self.turns and len(encode(self.messages(question))) > limit:
            del self.turns[0]
        return num_turns - len(self.turns)


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
            f"unknown command /{name}; known: {known} (a message that starts with a slash needs a space before it)"
        )
    return command.run(settings, rest.strip())


def _help(_settings: ChatSettings, _rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    return "\n".join(
        [
            *(f"  {command.usage:{width}}  {command.text}" for command in COMMANDS.values()),
            '  """ starts and ends a message of several lines; or end each line but the last with \\.',
            "  Ctrl-C stops an answer and keeps its text so far; Ctrl-D ends the chat.",
        ]
    )


def _system(settings: ChatSettings, text: str) -> str:
    if text:
        settings.conversation.system = "" if text == OFF else text
    return f"system: {settings.conversation.system or 'that of the chat template'}"


def _reset(settings: ChatSettings, _rest: str) -> str:
    settings.conversation.turns.clear()
    return "started a new conversation"


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
        raise JobError(f"{name} is {text!r}, but must be {kind}, or {OFF}") from None


class Command(NamedTuple):
    """How a command is written, what it does, and the function that does it."""

    usage: str
    text: str
    run: Callable[[ChatSettings, str], str]


COMMANDS = {
    "help": Command("/help", "show this list", _help),
    "system": Command("/system TEXT", f"set the system prompt; {OFF}: that of the chat template", _system),
    "reset": Command("/reset", "start a new conversation", _reset),
    "temp": Command(
        "/temp X", "set the sampling temperature; 0 is greedy", _parameter("temperature", float, "0 (greedy)")
    ),
    "seed": Command("/seed N", f"set the random seed; {OFF}: random", _parameter("seed", int, "random")),
    "mode": Command(
        "/mode MODE", "set the drafting mode: async, sync, or plain (no speculation)", _parameter("mode", str, "async")
    ),
    "max": Command(
        "/max N", "set the maximum number of tokens per answer", _parameter("max_tokens", int, "128", MOST_TOKENS)
    ),
    "quit": Command("/quit", "end the chat", _quit),
}
ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "clear": "reset", "temperature": "temp"}


T = TypeVar("T")
CHECK_S = 0.2  # between two looks at the processes that serve
ANSWER_SHARE = 4  # at least one in so many tokens of the context is the answer's


class Chat:
    """Answers questions by a client, in an event loop of its own. `tend` is called while an answer is waited for, and
    may raise.

    note   shows a line that is no answer
    """

    def __init__(
        self,
        client: AsyncClient,
        settings: ChatSettings,
        pen: Pen,
        note: Callable[[str], object],
        tend: Callable[[], object] = bool,
    ) -> None:
        self._client, self._settings, self._pen, self._note, self._tend = client, settings, pen, note, tend
        self._runner = asyncio.Runner()
        self._waiting: asyncio.Task[Any] | None = None  # what the loop was last run for
        self._text = ""  # of the answer that is being written

    def served(self) -> ServedModel:
        """Wait for the model; raises JobError if there is none, or if it cannot chat."""
        served = self._run(self._client.served())
        if not served.codec.has_chat_template:
            name = served.info.name
            raise JobError(f"{name} has no chat template, so it cannot chat; use `specq submit` to complete texts")
        return served

    def close(self) -> None:
        """Close the client, which stops what runs, and the loop."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        """Close the client; first stop what still waits, as it does after a signal that left the loop by an
        exception."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        await self._client.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def talk(self, read_line: ReadLine) -> None:
        """Answer messages from the keyboard until the user ends it."""
        while not self._settings.ended:
            try:
                message = read_message(read_line)
            except EOFError:
                self._note("")
                return
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D or /quit ends the chat)")
                continue
            self._take(message)

    def _take(self, message: str) -> None:
        """Do what one message asks for; what is wrong with it is shown."""
        try:
            if message.startswith("/"):
                self._show(run_command(message, self._settings))
            elif message.strip():
                self.ask(message.strip())
        except JobError as error:
            self._note(f"specq: {error}")
        except KeyboardInterrupt:
            self._note("(stopped)")

    def _show(self, text: str) -> None:
        if text:
            self._note(text)

    # --- an answer --------------------------------------------------------------------------------------------------

    def ask(self, question: str) -> None:
        """Write the answer as it comes, and a line on it. Raises KeyboardInterrupt after Ctrl-C, and JobError."""
        conversation, self._text = self._settings.conversation, ""
        self._make_room(question)
        messages = conversation.messages(question)
        try:
            result = self._run(self._write(messages))
        finally:
            if self._text:
                self._pen.finish()
                conversation.turns.append((question, self._text.strip()))
        self._note(f"({summary(result)}{self._remarks(result)})")

    async def _write(self, messages: list[dict[str, str]]) -> Result:
        """Write an answer's pieces; return the result, which comes with the last."""
        async for piece in self._client.stream(messages=messages, **self._settings.parameters):
            for text, origin in piece.spans:
                self._pen.write(text, origin)
            self._text += piece.text
            if piece.result:
                result = piece.result
        return result

    def _make_room(self, question: str) -> None:
        """Drop the oldest turns where the conversation leaves too little room for an answer, and say so."""
        served = self._run(self._client.served())
        limit = served.context_length
        asked = self._settings.parameters.get("max_tokens", limit)
        dropped = self._settings.conversation.fit(
            question, served.codec.encode_chat, limit - min(asked, limit // ANSWER_SHARE)
        )
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the oldest {dropped} turns"
            self._note(f"({turns} dropped: {served.info.name} accepts {limit} tokens in total)")

    def _remarks(self, result: Result) -> str:
        """Return what else there is to say: the seed that was drawn, and why the text ends where it does."""
        seed = f"; seed {result.stats['seed']}" if self._settings.parameters.get("temperature") else ""
        cut = f"; cut at {len(result.token_ids)} tokens (/max)" if result.finish_reason == "length" else ""
        return seed + cut

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(self._tended(work))

    async def _tended(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine and look after the processes meanwhile; it is stopped with whoever waits."""
        self._waiting, task = asyncio.current_task(), asyncio.ensure_future(work)
        try:
            while not task.done():
                self._tend()
                await asyncio.wait({task}, timeout=CHECK_S)
        finally:
            task.cancel()
            await asyncio.wait({task})
        return await task

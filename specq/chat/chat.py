"""A conversation with a model that is served: questions, commands, answers.

Rule: Ctrl-C stops the answer and not the chat; what came of the answer stays in the conversation, as it stays on the
screen. What fails costs the question that it was for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specq.chat.commands import ChatSettings, run_command
from specq.chat.pen import Pen
from specq.chat.reading import ReadLine, read_message
from specq.chat.summary import summary
from specq.client import AsyncClient, Result, ServedModel
from specq.protocol import JobError

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
            raise JobError(f"{name} has no chat template: it does not chat, but completes texts (specq submit)")
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
            self._note(f"({turns} dropped: {served.info.name} takes {limit} tokens in all)")

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

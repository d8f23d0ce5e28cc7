"""The broker behind the gateway: a client for each model, and what the broker reports."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from specq.client import PreparedClient, ServedModel
from specq.gateway.errors import ApiError
from specq.protocol import JobError

REPORT_S = 1.0  # for so long a report counts as new
READY_S = 2.0  # for the broker to answer, before it counts as gone


class Upstream:
    """Clients of one broker. A model's client is made when the broker is known to serve it."""

    def __init__(self, broker: str, keys: str | Path = "", timeout_s: float = 10.0) -> None:
        self._options: dict[str, Any] = {"broker": broker, "keys": keys, "timeout_s": timeout_s, "wait_s": 0.0}
        self._clients: dict[str, PreparedClient] = {"": PreparedClient(**self._options)}
        self._retired: list[PreparedClient] = []  # of models that were replaced; their jobs may still run
        self._first_served: dict[str, int] = {}  # model -> when, in seconds since 1970
        self._report: tuple[float, dict[str, Any]] = (0.0, {})
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def report(self, timeout_s: float | None = None, fresh_s: float = REPORT_S) -> dict[str, Any]:
        """Return the broker's report, not older than `fresh_s`; raises JobError (or TimeoutError after `timeout_s`) if
        it does not answer."""
        at, report = self._report
        if at and time.monotonic() - at < fresh_s:
            return report
        if self._asking is None:  # one question for all who wait
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._asking)

    async def _ask(self) -> dict[str, Any]:
        try:
            report = await self._clients[""].status()
            self._report = (time.monotonic(), report)
            for model in report["models"]:
                self._first_served.setdefault(model, int(time.time()))
            return report
        finally:
            self._asking = None

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        return list((await self.report())["models"])

    def first_served(self, model: str) -> int:
        """Return when this gateway first saw a model served, in seconds since 1970; 0: never."""
        return self._first_served.get(model, 0)

    async def get(self, model: str) -> tuple[PreparedClient, ServedModel]:
        """Return a model's client, and the model ("": the only one); raises ApiError if it is not served."""
        client = self._clients.get(model)
        if client is None:
            await self._check(model)
            client = self._clients.setdefault(model, PreparedClient(model=model, **self._options))
        try:
            served = await client.served()
        except JobError as error:
            if error.code == "no_verifier" and model:
                await self._check(model)
            raise
        if not _is_served(served, await self.report()):
            client = self._replace(model)
            served = await client.served()
        return client, served

    def _replace(self, model: str) -> PreparedClient:
        """Make another client for a name behind which there is another model now: it fetches that one's tokenizer."""
        self._retired.append(self._clients[model])
        self._clients[model] = PreparedClient(model=model, **self._options)
        return self._clients[model]

    async def _check(self, model: str) -> None:
        models = await self.models()
        if model not in models and models:
            message = f"the model {model[:200]!r} is not served here; served are {', '.join(models)}"
            raise ApiError(message, 404, "model", "model_not_found")
        if model not in models:
            raise JobError("no verifier is registered", "no_verifier")

    async def close(self) -> None:
        """Close the clients: jobs that nobody may ask for again are stopped."""
        await asyncio.gather(*(client.close() for client in (*self._clients.values(), *self._retired)))


def _is_served(served: ServedModel, report: dict[str, Any]) -> bool:
    """Return whether a verifier still has this model with this tokenizer; so it is where there is none just now."""
    targets = [worker for worker in report["workers"] if worker["role"] == "target" and "tokenizer" in worker]
    found = [(worker["model"], worker["tokenizer"]) for worker in targets]
    if served.asked:
        found = [one for one in found if one[0] == served.asked]
    return not found or (served.info.name, served.info.tokenizer_hash) in found

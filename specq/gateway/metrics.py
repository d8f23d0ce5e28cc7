"""What the gateway counts, for Prometheus: requests, their times, tokens, and what speculation did for them.

Names follow Prometheus' conventions; a label has few values, so paths that are not ours are one. To add a metric: a line here, and
one in docs/http-api.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specq.client import Result

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/ready", "/version", "/metrics", "/", "/specq/status"),
)
OTHER = "other"
GONE = "gone"  # instead of a status: the client left before the answer began
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry, labels = self._registry, ("path", "status")
        self._requests = Counter("specq_http_requests", "HTTP requests that have ended.", labels, registry=registry)
        self._seconds = Histogram(
            "specq_http_request_seconds", "From request to end.", ("path",), buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            "specq_http_first_token_seconds", "To the first tokens, of streams.", buckets=_SECONDS, registry=registry
        )
        self._under_way = Gauge(
            "specq_http_requests_under_way", "HTTP requests that have not ended.", registry=registry
        )
        self._tokens = {
            "prompt_tokens": Counter("specq_prompt_tokens", "Tokens of prompts.", registry=registry),
            "completion_tokens": Counter("specq_completion_tokens", "Tokens that were generated.", registry=registry),
        }
        self._stats = {
            "rounds": Counter("specq_rounds", "Rounds of verification.", registry=registry),
            "draft_tokens": Counter("specq_draft_tokens", "Drafted tokens that were verified.", registry=registry),
            "accepted_tokens": Counter(
                "specq_accepted_tokens", "Drafted tokens that were accepted.", registry=registry
            ),
        }

    def note_results(self, results: Iterable[Result], n: int) -> None:
        """Count the tokens of a request whose prompts have `n` completions each."""
        for place, result in enumerate(results):
            for name, counter in self._tokens.items():
                if name != "prompt_tokens" or place % n == 0:
                    counter.inc(result.usage[name])
            for name, counter in self._stats.items():
                counter.inc(result.stats[name])

    def note_first_token(self, seconds: float) -> None:
        """Note when a stream's first tokens came."""
        self._first.observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the app, whose requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = GONE

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            path = scope["path"] if scope["path"] in PATHS else OTHER
            started = time.perf_counter()
            with self._under_way.track_inprogress():
                try:
                    await app(scope, receive, noting)
                finally:
                    self._requests.labels(path, status).inc()
                    self._seconds.labels(path).observe(time.perf_counter() - started)

        return counted

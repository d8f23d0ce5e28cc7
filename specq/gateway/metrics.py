"""What the gateway counts, for Prometheus: requests and their times; and beside it what its broker reports of the
pipeline.

Names follow Prometheus' conventions; a label has few values, so paths that are not ours are one. To add a metric: a
line here, or in `specq.gateway.pipeline_metrics`, and one in docs/observability.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specq.client import Result
from specq.gateway.pipeline_metrics import VLLM, PipelineMetrics
from specq.gateway.report_series import Report

PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/ready", "/version", "/metrics", "/", "/specq/status"),
)
OTHER = "other"
GONE = "gone"  # instead of a status: the client left before the answer began
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_SHORT_SECONDS = (0.0005, *_SECONDS[:-4])


class HttpMetrics:
    """Requests, by the paths of the gateway."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "specq_http_requests", "HTTP requests that have ended.", ("path", "status"), registry=registry
        )
        self.seconds = Histogram(
            "specq_http_request_seconds", "From request to end.", ("path",), buckets=_SECONDS, registry=registry
        )
        self.first = Histogram(
            "specq_http_first_token_seconds", "To the first tokens, of streams.", buckets=_SECONDS, registry=registry
        )
        self.under_way = Gauge("specq_http_requests_under_way", "HTTP requests that have not ended.", registry=registry)


class AnswerMetrics:
    """Completions that this gateway has answered, as vLLM names them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, VLLM, buckets=buckets, registry=registry)

        self.first = histogram("time_to_first_token_seconds", "To the first tokens of a completion.")
        self.between = histogram("inter_token_latency_seconds", "Between the events of a stream.", _SHORT_SECONDS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", _SHORT_SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From request to end, of completions.")
        self.ended = Counter(
            "vllm:request_success", "Completions, by why they ended.", (*VLLM, "finished_reason"), registry=registry
        )

    def note(self, model: str, result: Result, seconds: float) -> None:
        """Note a completion that took so long."""
        labels, num_tokens = (model, "0"), result.usage["completion_tokens"]
        first_s = result.stats["time_to_first_token_ms"] / 1e3
        self.first.labels(*labels).observe(first_s)
        self.whole.labels(*labels).observe(seconds)
        if num_tokens > 1:
            self.per_token.labels(*labels).observe(max(seconds - first_s, 0.0) / (num_tokens - 1))
        self.ended.labels(*labels, result.finish_reason).inc()


class Metrics:
    """The metrics of one gateway, and of the pipeline behind it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._http, self._answers = HttpMetrics(self._registry), AnswerMetrics(self._registry)
        self._pipeline = PipelineMetrics()
        self._registry.register(self._pipeline)

    def note_results(self, model: str, results: Sequence[Result], seconds: float) -> None:
        """Note the completions of a request, which took so long."""
        for result in results:
            self._answers.note(model, result, seconds)

    def note_first_token(self, seconds: float) -> None:
        """Note when a stream's first tokens came."""
        self._http.first.observe(seconds)

    def note_event(self, model: str, seconds: float) -> None:
        """Note the time between two events of a stream that carry tokens."""
        self._answers.between.labels(model, "0").observe(seconds)

    def text(self, report: Report) -> bytes:
        """Return everything in Prometheus' text format; `report`: of the broker, empty where it does not answer."""
        self._pipeline.report = report
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
            with self._http.under_way.track_inprogress():
                try:
                    await app(scope, receive, noting)
                finally:
                    self._http.requests.labels(path, status).inc()
                    self._http.seconds.labels(path).observe(time.perf_counter() - started)

        return counted

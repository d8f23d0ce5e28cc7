"""The gateway's metrics for Prometheus: requests and their times, and the broker's report of the pipeline.

To add a metric of the pipeline, add a line in `TABLE`. To add one of the gateway, add it beside the other counters. Add
a line in docs/observability.md in both cases. `specq.gateway.report_series` reads the report.

Names follow Prometheus' conventions. A label has few values, so all unknown paths share one. Names that begin with
`vllm:` have the same meaning as in vLLM, for tools that read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specq.client import Result
from specq.gateway import report_series as series
from specq.gateway.report_series import Buckets, Labels, Read, Report, Sample, Total
from specq.protocol import ROW_LIMITS, STEP_LIMITS_US

Family = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily] | type[SummaryMetricFamily]

MODEL, WORKER = ("model",), ("worker",)
SOURCE, DEPTH, CHOICE = (*WORKER, "source"), (*WORKER, "depth"), (*WORKER, "sources")
VLLM = ("model_name", "engine")  # all verifiers of a model together; vLLM would number them
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
DROPPED = (
    *("dropped_front", "dropped_back", "limited_requests", "limited_drafts", "late_drafts", "late_verdicts"),
    *("misfit_verdicts", "forbidden", "undelivered"),
)


class MetricLine(NamedTuple):
    """One metric; the exported name of a counter ends in `_total`."""

    family: Family
    name: str
    text: str
    labels: tuple[str, ...]
    read: Read


C, G, H, S = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily

TABLE = (
    MetricLine(G, "specq_broker_up", "Whether the broker answers.", (), series.is_up),
    # rounds of all sessions of a model, from the verdicts that the broker received
    MetricLine(
        C, "specq_rounds", "Rounds: steps of one session, plain ones included.", MODEL, series.of_rounds("rounds")
    ),
    MetricLine(C, "specq_drafted_rounds", "Rounds that verified drafts.", MODEL, series.of_rounds("drafted_rounds")),
    MetricLine(C, "specq_prompt_tokens", "Tokens of the prompts of jobs.", MODEL, series.of_rounds("prompt_tokens")),
    MetricLine(C, "specq_completion_tokens", "Tokens that were committed.", MODEL, series.of_rounds("tokens")),
    MetricLine(C, "specq_draft_tokens", "Draft tokens that were verified.", MODEL, series.of_rounds("draft_tokens")),
    MetricLine(
        C, "specq_accepted_tokens", "Draft tokens that were accepted.", MODEL, series.of_rounds("accepted_tokens")
    ),
    MetricLine(H, "specq_accepted_length", "Accepted tokens of a drafted round.", MODEL, series.accepted_lengths),
    # jobs and queues
    MetricLine(G, "specq_jobs_waiting", "Jobs that no verifier has.", MODEL, series.of_loads("waiting")),
    MetricLine(G, "specq_jobs_running", "Jobs that a verifier has.", MODEL, series.of_loads("running")),
    MetricLine(C, "specq_jobs_submitted", "Jobs that were taken.", (), series.of_counts("jobs")),
    MetricLine(C, "specq_jobs_ended", "Jobs that ended, by why.", ("finish",), series.jobs_ended),
    MetricLine(C, "specq_jobs_moved", "Sessions that went to another verifier.", (), series.of_counts("moved")),
    MetricLine(C, "specq_broker_dropped", "What the broker dropped, by why.", ("what",), series.of_counts(*DROPPED)),
    # the journal
    MetricLine(S, "specq_journal_commit_seconds", "Groups of records written.", (), series.journal_commits),
    MetricLine(C, "specq_journal_records", "Records for the journal.", (), series.of_journal("records")),
    MetricLine(
        G, "specq_journal_records_waiting", "Records not written yet.", (), series.of_journal("records_waiting")
    ),
    MetricLine(G, "specq_journal_trouble", "Whether the journal cannot be written.", (), series.journal_trouble),
    # workers
    MetricLine(C, "specq_workers_registered", "Workers that registered.", (), series.of_counts("workers_registered")),
    MetricLine(C, "specq_workers_lost", "Workers that fell silent or hung.", (), series.of_counts("workers_lost")),
    MetricLine(C, "specq_workers_revoked", "Workers whose key was removed.", (), series.of_counts("workers_revoked")),
    MetricLine(G, "specq_worker_info", "A worker, always 1.", (*WORKER, "role", "model", "engine"), series.worker_info),
    MetricLine(G, "specq_worker_ready", "Whether it takes work.", WORKER, series.worker_ready),
    MetricLine(G, "specq_worker_silent_seconds", "Since its last message.", WORKER, series.of_workers("heard_s_ago")),
    MetricLine(G, "specq_worker_jobs", "Jobs that it has.", WORKER, series.of_workers("jobs")),
    MetricLine(
        C, "specq_worker_steps", "Steps of a verifier, passes of a drafter.", WORKER, series.of_workers("steps")
    ),
    MetricLine(C, "specq_worker_reconnects", "Registrations but the first.", WORKER, series.of_metrics("reconnects")),
    MetricLine(
        C, "specq_worker_messages_dropped", "Messages not taken.", WORKER, series.of_metrics("messages_dropped")
    ),
    MetricLine(C, "specq_worker_sent_bytes", "Bytes that it sent.", WORKER, series.of_workers("sent_bytes")),
    MetricLine(C, "specq_worker_received_bytes", "Bytes sent to it.", WORKER, series.of_workers("received_bytes")),
    # verifiers: steps
    MetricLine(
        H, "specq_step_seconds", "Times of a step's phases.", (*WORKER, "phase"), series.step_seconds(STEP_LIMITS_US)
    ),
    MetricLine(H, "specq_step_rows", "Rows of a step.", WORKER, series.histogram("step_rows", ROW_LIMITS)),
    MetricLine(H, "specq_step_sessions", "Sessions of a step.", WORKER, series.histogram("step_sessions", ROW_LIMITS)),
    MetricLine(G, "specq_kv_slots", "KV slots that it has.", WORKER, series.of_workers("kv_slots", "target")),
    MetricLine(G, "specq_kv_slots_free", "KV slots that are free.", WORKER, series.of_workers("free_slots", "target")),
    # verifiers: drafts
    MetricLine(C, "specq_source_sent_tokens", "Tokens drafted.", SOURCE, series.by_label("sent")),
    MetricLine(C, "specq_source_verified_tokens", "Draft tokens verified.", SOURCE, series.by_label("judged", 0)),
    MetricLine(C, "specq_source_accepted_tokens", "Draft tokens accepted.", SOURCE, series.by_label("judged", 1)),
    MetricLine(C, "specq_depth_verified_tokens", "Draft tokens verified.", DEPTH, series.by_depth("verified_at")),
    MetricLine(C, "specq_depth_accepted_tokens", "Draft tokens accepted.", DEPTH, series.by_depth("accepted_at")),
    MetricLine(
        C, "specq_stale_tokens", "Drafted, and contradicted before verified.", WORKER, series.of_metrics("stale")
    ),
    MetricLine(C, "specq_orphan_tokens", "Drafted below an unknown parent.", WORKER, series.of_metrics("orphans")),
    MetricLine(C, "specq_drafts_dropped", "Drafts without time or room.", WORKER, series.of_metrics("drafts_dropped")),
    MetricLine(C, "specq_round_hits", "Rounds that began with drafts.", WORKER, series.of_metrics("hits")),
    MetricLine(C, "specq_round_misses", "Rounds that began without.", WORKER, series.of_metrics("misses")),
    # verifiers: gains of sources
    MetricLine(G, "specq_choice_used", "Whether these sources are in use.", CHOICE, series.by_label("choices", 0)),
    MetricLine(G, "specq_choice_tokens_per_second", "Expected with them.", CHOICE, series.by_label("choices", 1)),
    MetricLine(C, "specq_decisions", "Decided, by why.", (*WORKER, "reason"), series.by_label("decisions")),
    # drafters
    MetricLine(C, "specq_drafter_drafts", "Drafts that it sent.", WORKER, series.of_metrics("drafts")),
    MetricLine(C, "specq_drafter_tokens", "Draft tokens that it sent.", WORKER, series.of_metrics("draft_nodes")),
    MetricLine(
        C,
        "specq_drafter_accepted_tokens",
        "Its draft tokens that a verifier accepted.",
        (*WORKER, "verifier"),
        series.by_label("accepted_for"),
    ),
    # vLLM's names
    MetricLine(G, "vllm:num_requests_running", "Jobs that a verifier has.", VLLM, series.of_loads("running")),
    MetricLine(G, "vllm:num_requests_waiting", "Jobs that no verifier has.", VLLM, series.of_loads("waiting")),
    MetricLine(G, "vllm:kv_cache_usage_perc", "KV slots in use; 1 is all.", VLLM, series.kv_use),
    MetricLine(C, "vllm:prompt_tokens", "Tokens of prompts.", VLLM, series.of_rounds("prompt_tokens")),
    MetricLine(C, "vllm:generation_tokens", "Tokens that were committed.", VLLM, series.of_rounds("tokens")),
    MetricLine(C, "vllm:spec_decode_num_drafts", "Drafted rounds.", VLLM, series.of_rounds("drafted_rounds")),
    MetricLine(C, "vllm:spec_decode_num_draft_tokens", "Draft tokens.", VLLM, series.of_rounds("draft_tokens")),
    MetricLine(C, "vllm:spec_decode_num_accepted_tokens", "Accepted ones.", VLLM, series.of_rounds("accepted_tokens")),
    MetricLine(C, PER_POSITION, "Rounds that accepted this far.", (*VLLM, "position"), series.accepted_by_position),
)


class PipelineMetrics(Collector):
    """The metrics of the last report; without a report, only their names."""

    def __init__(self) -> None:
        self.report: Report = {}

    def collect(self) -> Iterable[Metric]:
        return map(self._metric, TABLE)

    def _metric(self, line: MetricLine) -> Metric:
        metric: Any = line.family(line.name, line.text, labels=line.labels)
        for labels, value in _labelled(line, line.read(self.report)):
            metric.add_metric(labels, *(value if isinstance(value, Buckets | Total) else (value,)))
        return cast("Metric", metric)


def _labelled(line: MetricLine, samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples with a value for each label, each series once.

    A sample with another number of labels is left out.
    """
    seen = set[Labels]()
    for labels, value in samples:
        full = (labels[0], "0", *labels[1:]) if line.labels[:2] == VLLM else labels
        if len(full) == len(line.labels) and full not in seen:
            seen.add(full)
            yield full, value


PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/files", "/v1/batches", "/v1/models", "/tokenize", "/detokenize"),
    *("/health", "/ready", "/version", "/metrics", "/", "/specq/status"),
)
OTHER = "other"
GONE = "gone"  # no status: the client left before the answer began
_UNDER = ("/v1/files/", "/v1/batches/")  # the paths of one file or batch count as this one
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_SHORT_SECONDS = (0.0005, *_SECONDS[:-4])


def _known_path(path: str) -> str:
    """Return the label of a path."""
    return path if path in PATHS else next((one for one in _UNDER if path.startswith(one)), OTHER)


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
        self.lines = Counter(
            "specq_batch_lines", "Lines of batches that were answered.", ("status",), registry=registry
        )
        self.running_lines = Gauge("specq_batch_lines_under_way", "Lines of batches that run.", registry=registry)


class AnswerMetrics:
    """Completions that this gateway has answered, under vLLM's names."""

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
        """Count a completion and its time in seconds."""
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
        """Count the completions of a request and its time in seconds."""
        for result in results:
            self._answers.note(model, result, seconds)

    def note_first_token(self, seconds: float) -> None:
        """Record the time of a stream's first tokens, in seconds."""
        self._http.first.observe(seconds)

    def note_event(self, model: str, seconds: float) -> None:
        """Record the time between two events of a stream that carry tokens, in seconds."""
        self._answers.between.labels(model, "0").observe(seconds)

    def running_line(self) -> AbstractContextManager[None]:
        """Count a line of a batch as running until the block ends."""
        return self._http.running_lines.track_inprogress()

    def note_line(self, status: int) -> None:
        """Count an answered line of a batch."""
        self._http.lines.labels(str(status)).inc()

    def text(self, report: Report) -> bytes:
        """Return all metrics in Prometheus' text format.

        report  of the broker; empty if it does not answer.
        """
        self._pipeline.report = report
        return generate_latest(self._registry)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the app with its requests counted."""

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

            path = _known_path(scope["path"])
            started = time.perf_counter()
            with self._http.under_way.track_inprogress():
                try:
                    await app(scope, receive, noting)
                finally:
                    self._http.requests.labels(path, status).inc()
                    self._http.seconds.labels(path).observe(time.perf_counter() - started)

        return counted

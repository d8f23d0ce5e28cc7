"""What `/metrics` shows of the pipeline: from what workers count to Prometheus' text, and its names against docs, the
files in configs/ for Grafana and Prometheus, and vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specq.gateway.metrics import TABLE, Metrics
from specq.gateway.routes import service
from specq.protocol import GetStatus, Status
from specq.testing import World
from specq.testing.fake_broker import answer
from tests.each import each
from tests.gateway.serving import connected, running

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "observability.md").read_text()
BOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUMS = ("_sum", "_count")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", *SUMS), "summary": SUMS}
LABELS = {label for line in TABLE for label in line.labels} | {"le", "instance", "path", "status"}


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values by (name, label value, ...), labels in the order of their names."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in found, f"{key} is there twice: Prometheus would drop one"
            found[key] = sample.value
    return found


def shown(report: dict[str, Any]) -> dict[tuple[str, ...], float]:
    return samples(Metrics().text(report).decode())


@pytest.fixture(scope="module")
def served() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report of a broker whose workers have served some jobs, and what each job counted."""
    world = World()
    world.add_verifier()
    world.add_drafter()
    jobs = [world.submit(number, [3, 4, number], max_tokens=80) for number in range(1, 6)]
    world.run_until(lambda: all(job.finish for job in jobs))
    world.run(2.0)
    world.send(GetStatus())
    world.run(1.0)
    return world.status(), [job.stats for job in jobs]


def total(stats: list[dict[str, Any]], name: str) -> float:
    return float(sum(one[name] for one in stats))


# --- what is shown is what happened -----------------------------------------------------------------------------------


def test_rounds_are_those_of_the_jobs(served):
    report, stats = served
    found = shown(report)

    assert found["specq_rounds_total", "toy"] == total(stats, "rounds")
    assert found["specq_drafted_rounds_total", "toy"] == total(stats, "drafted_rounds") > 0
    assert found["specq_draft_tokens_total", "toy"] == total(stats, "draft_tokens")
    assert found["specq_accepted_tokens_total", "toy"] == total(stats, "accepted_tokens") > 0
    assert (found["specq_prompt_tokens_total", "toy"], found["specq_completion_tokens_total", "toy"]) == (15, 400)
    assert found["specq_accepted_length_count", "toy"] == total(stats, "drafted_rounds")
    assert found["specq_jobs_ended_total", "length"] == found["specq_jobs_submitted_total",] == 5


def test_a_verifier_counts_the_same_by_source_and_by_depth(served):
    report, stats = served
    found = shown(report)

    for what, name in (("verified", "draft_tokens"), ("accepted", "accepted_tokens")):
        for by in ("source", "depth"):
            of = [value for key, value in found.items() if key[0] == f"specq_{by}_{what}_tokens_total"]
            assert sum(of) == total(stats, name)
    assert found["specq_stale_tokens_total", "v0"] == total(stats, "stale")


def test_vllms_names_mean_what_they_mean_there(served):
    """`num_drafts` are drafted rounds; a position counts rounds that accepted so far: all positions together are the
    accepted tokens."""
    report, stats = served
    found = shown(report)
    of = ("0", "toy")

    assert found["vllm:spec_decode_num_drafts_total", *of] == total(stats, "drafted_rounds")
    assert found["vllm:spec_decode_num_draft_tokens_total", *of] == total(stats, "draft_tokens")
    assert found["vllm:spec_decode_num_accepted_tokens_total", *of] == total(stats, "accepted_tokens")
    per_position = [value for key, value in found.items() if key[0].endswith("accepted_tokens_per_pos_total")]
    assert per_position == sorted(per_position, reverse=True)
    assert sum(per_position) == total(stats, "accepted_tokens")
    assert found["vllm:generation_tokens_total", *of] == 400
    assert (found["vllm:num_requests_running", *of], found["vllm:num_requests_waiting", *of]) == (0, 0)
    assert found["vllm:kv_cache_usage_perc", *of] == 0


def test_histograms_are_cumulative(served):
    found = shown(served[0])
    buckets = [value for key, value in found.items() if key[:1] == ("specq_step_rows_bucket",)]

    assert buckets == sorted(buckets)
    assert buckets[-1] == found["specq_step_rows_count", "v0"] > 0
    assert found["specq_step_seconds_sum", "forward", "v0"] > 0


def test_jobs_are_counted_by_model_and_state():
    report = {"models": ["a", "b"], "loads": {"b": {"waiting": 2, "running": 1}}}
    found = shown(report)

    assert [found["specq_jobs_waiting", model] for model in "ab"] == [0, 2]
    assert [found["vllm:num_requests_running", "0", model] for model in "ab"] == [0, 1]


def test_workers_with_one_name_have_distinct_labels():
    """Prometheus refuses a scrape in which a series stands twice; and any name is a label."""
    workers = [{"name": name, "role": "target", "jobs": jobs} for jobs, name in enumerate(["w", "w", 'x"\n\\'])]
    found = shown({"workers": workers})

    assert [found["specq_worker_jobs", name] for name in ("w", "w (2)", 'x"\n\\')] == [0, 1, 2]


def test_a_worker_keeps_its_series_while_another_has_its_name():
    """In any order of the broker's report, which changes after a restart."""
    workers = [{"name": "w", "role": "target", "jobs": jobs, "incarnation": 0x10 + jobs} for jobs in (1, 2)]
    for order in (workers, workers[::-1]):
        found = shown({"workers": order})
        assert [found["specq_worker_jobs", name] for name in ("w (11)", "w (12)")] == [1, 2]
    assert shown({"workers": workers[1:]})["specq_worker_jobs", "w"] == 2


def test_what_verifiers_draft_by_and_how_often_they_decided_is_shown(served):
    """Of a version before, which counted something else, nothing is."""
    said = {"choices": {"colocated unread": [1, 41.5], "none": [0, 28]}, "decisions": {"probe": 3, "probe_won": 2}}
    verifiers = [{"name": "v", "metrics": said}, {"name": "old", "metrics": {"arms": {"1 suffix": [1, 0]}}}]
    found = shown({"workers": verifiers})

    assert {key: value for key, value in found.items() if "choice" in key[0] or "decisions" in key[0]} == {
        ("specq_choice_used", "colocated unread", "v"): 1,
        ("specq_choice_used", "none", "v"): 0,
        ("specq_choice_tokens_per_second", "colocated unread", "v"): 41.5,
        ("specq_choice_tokens_per_second", "none", "v"): 28,
        ("specq_decisions_total", "probe", "v"): 3,
        ("specq_decisions_total", "probe_won", "v"): 2,
    }
    assert sum(value for key, value in shown(served[0]).items() if key[0] == "specq_choice_used") == 1


# --- what comes from elsewhere harms nothing --------------------------------------------------------------------------

JUNK = (None, True, -1, "x", [], {}, [[1]], {"x": {"y": []}}, [None], {"": None}, float("nan"), 1e308, [1] * 200)
METRICS = ("step_us", "step_rows", "judged", "sent", "verified_at", "stale", "choices", "decisions", "reconnects")


@each("junk", JUNK)
def test_a_report_of_any_form_gives_text(junk, served):
    report = served[0]
    for name in report:
        samples(Metrics().text(report | {name: junk}).decode())
    for value in (junk, {"forward": junk, "4 x": junk, "a b c": junk}):
        worker = {"name": "w", "role": "target", "metrics": dict.fromkeys(METRICS, value)}
        text = Metrics().text({"workers": [worker, junk], "rounds": {"m": junk}, "counts": {"jobs": junk}})
        assert samples(text.decode())["specq_broker_up",] == 1


def test_a_worker_of_another_version_loses_only_what_differs():
    """A histogram with more limits than are known is not shown; names that are not known are left alone."""
    metrics = {"step_rows": [1] * 20, "step_sessions": [3, 1, 1], "stale": 4, "not_known_yet": {"a": 1}}
    found = shown({"workers": [{"name": "w", "role": "target", "metrics": metrics}]})

    assert ("specq_step_rows_count", "w") not in found
    assert (found["specq_step_sessions_count", "w"], found["specq_stale_tokens_total", "w"]) == (2, 4)


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_the_broker_is_asked_at_each_scrape(broker, own_cache, monkeypatch):
    """What has ended is counted, however soon after: `vllm bench serve` looks once, at its end."""
    monkeypatch.setattr("specq.gateway.routes.service.FRESH_S", 0.0)
    asked = 0

    def counting(message):
        nonlocal asked
        if not isinstance(message, GetStatus):
            return answer(message)
        asked += 1
        return [Status(report={"models": ["fake"], "workers": [], "rounds": {"fake": {"rounds": asked}}})]

    broker.reply = counting
    with running(broker.address) as gateway, connected(gateway) as http:
        seen = [samples(http.get("/metrics").text)["specq_rounds_total", "fake"] for _ in range(4)]
    assert len(set(seen)) == 4


def test_without_a_broker_the_rest_is_shown(own_cache, free_address, monkeypatch):
    monkeypatch.setattr(service, "READY_S", 0.1)
    with running(free_address) as gateway, connected(gateway) as http:
        http.get("/health")
        found = samples(http.get("/metrics").text)

    assert found["specq_broker_up",] == 0
    assert found["specq_http_requests_total", "/health", "200"] == 1


def test_completions_are_timed_as_vllm_does(broker, own_cache):
    with running(broker.address) as gateway, connected(gateway) as http:
        for body in ({"n": 2}, {"stream": True}, {"max_tokens": 1}):
            assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, **body}).status_code == 200
        found = samples(http.get("/metrics").text)
    of = ("0", "fake")

    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert found[f"vllm:{name}_count", *of] == 4
    assert found["vllm:request_time_per_output_token_seconds_count", *of] == 3  # one has a single token
    assert found["vllm:inter_token_latency_seconds_count", *of] == 1  # the stream came in two pieces
    assert found["vllm:request_success_total", "0", "length", "fake"] == 4


# --- names ------------------------------------------------------------------------------------------------------------


def names() -> set[str]:
    """Return all names as they are shown: a counter with `_total`, others as they are."""
    families = text_string_to_metric_families(Metrics().text({}).decode())
    found = {family.name + "_total" * (family.type == "counter") for family in families}
    return {name for name in found if not name.endswith("_created")}


def test_every_metric_is_in_the_docs_and_no_other():
    named = set(re.findall(r"^\| `((?:specq_|vllm:)\w+)`", DOCS, re.MULTILINE))

    assert names() == named
    assert len(TABLE) > 50


def test_documented_labels_match_the_code():
    rows = dict(re.findall(r"^\| `((?:specq_|vllm:)\w+)` \| \w+ \|([^|]*)\|", DOCS, re.MULTILINE))

    for line in TABLE:
        name = line.name + "_total" * (line.family.__name__ == "CounterMetricFamily")
        assert tuple(re.findall(r"`(\w+)`", rows[name])) == line.labels, name


# --- the dashboard ----------------------------------------------------------------------------------------------------


def series() -> set[str]:
    """Return the names of all series that a scrape may have."""
    families = text_string_to_metric_families(Metrics().text({}).decode())
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def queried(text: str) -> set[str]:
    """Return the names of the metrics in a PromQL expression, or a text that has some."""
    return set(re.findall(r"(?:\bspecq_|\bvllm:)\w+", text))


@each("expression", EXPRESSIONS)
def test_a_panel_asks_for_metrics_that_there_are(expression):
    assert queried(expression)
    assert queried(expression) <= series()
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    assert {label.strip() for labels in grouped for label in labels.split(",")} <= LABELS


def test_the_guide_to_a_cluster_asks_for_metrics_that_there_are():
    guide = (ROOT / "docs" / "guides" / "cluster.md").read_text("utf-8")
    assert len(queried(guide)) > 5
    assert queried(guide) <= series()


def test_every_panel_takes_the_data_source_that_was_chosen():
    variables = {one["name"]: one["type"] for one in BOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    sources = [panel["datasource"] for panel in PANELS] + [one["datasource"] for p in PANELS for one in p["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_panels_have_a_place_and_a_title_of_their_own():
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in BOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]

    assert len(set(places)) == len(places)
    assert len(set(titles)) == len(titles) > 25
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in BOARD["panels"])


def test_what_counts_is_on_the_dashboard():
    """Rounds, acceptance, phases of steps, KV, queues, drops, stale drafts, reconnects, journal, decisions, HTTP."""
    asked = set().union(*map(queried, EXPRESSIONS))
    assert asked >= {
        *(
            "specq_rounds_total",
            "specq_step_seconds_sum",
            "specq_kv_slots_free",
            "specq_jobs_waiting",
            "specq_choice_used",
            "specq_decisions_total",
        ),
        *("specq_source_accepted_tokens_total", "specq_depth_accepted_tokens_total", "specq_stale_tokens_total"),
        *("specq_worker_reconnects_total", "specq_broker_dropped_total", "specq_journal_commit_seconds_count"),
        *("specq_accepted_length_sum", "specq_step_rows_sum", "specq_http_requests_total"),
    }


def test_the_docs_ask_for_metrics_that_there_are():
    queries = re.findall(r"^\| [^|]+ \| `(.+)` \|$", DOCS, re.MULTILINE)

    assert len(queries) > 5
    assert set().union(*map(queried, queries)) <= series()


def test_prometheus_is_pointed_at_the_gateways_own_address():
    text = (ROOT / "configs" / "prometheus.yml").read_text()
    serve = (ROOT / "configs" / "serve.toml").read_text()

    assert re.findall(r'targets: \["(.+)"\]', text) == re.findall(r'bind = "tcp://(.+)"', serve)

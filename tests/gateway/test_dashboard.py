"""The files for Grafana and Prometheus in configs/: they are valid, and ask only for what `/metrics` shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specq.gateway.metrics import TABLE, Metrics
from tests.each import each

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
LABELS = {label for line in TABLE for label in line.labels} | {"le", "instance", "path", "status"}


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
    """Rounds, acceptance, the phases of steps, KV, queues, drops, stale drafts, reconnects, journal, arms, HTTP."""
    asked = set().union(*map(queried, EXPRESSIONS))
    assert asked >= {
        *(
            "specq_rounds_total",
            "specq_step_seconds_sum",
            "specq_kv_slots_free",
            "specq_jobs_waiting",
            "specq_arm_used",
        ),
        *("specq_source_accepted_tokens_total", "specq_depth_accepted_tokens_total", "specq_stale_tokens_total"),
        *("specq_worker_reconnects_total", "specq_broker_dropped_total", "specq_journal_commit_seconds_count"),
        *("specq_accepted_length_sum", "specq_step_rows_sum", "specq_http_requests_total"),
    }


def test_the_docs_ask_for_metrics_that_there_are():
    text = (ROOT / "docs" / "observability.md").read_text()
    queries = re.findall(r"^\| [^|]+ \| `(.+)` \|$", text, re.MULTILINE)

    assert len(queries) > 5
    assert set().union(*map(queried, queries)) <= series()


def test_prometheus_is_pointed_at_the_gateways_own_address():
    text = (ROOT / "configs" / "prometheus.yml").read_text()
    serve = (ROOT / "configs" / "serve.toml").read_text()

    assert re.findall(r'targets: \["(.+)"\]', text) == re.findall(r'bind = "tcp://(.+)"', serve)

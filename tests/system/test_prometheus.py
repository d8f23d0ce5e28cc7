"""A real Prometheus scrapes a running `specq up --serve`: what is shown is accepted, and every query of the dashboard
can be asked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from specq.config.values import free_address
from specq.testing.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CONFIGS = Path(__file__).parents[2] / "configs"
READY_S, SCRAPED_S = 120.0, 60.0
BODY = {"model": "tiny", "prompt": "Once upon a time, one two three", "max_tokens": 48, "stream": True}


def program(name: str) -> str:
    """Return where a program of Debian's package is; fails where it is not installed."""
    found = shutil.which(name)
    assert found, f"{name} is not installed; these tests need Debian's package: apt-get install prometheus"
    return found


def get(url: str, **options: Any) -> httpx2.Response | None:
    try:
        return httpx2.get(url, trust_env=False, timeout=20, **options)
    except httpx2.TransportError:
        return None


def is_ok(url: str) -> bool:
    answer = get(url)
    return answer is not None and answer.status_code == 200


def complete(url: str, mode: str = "sync") -> None:
    answer = httpx2.post(f"{url}/v1/completions", json={**BODY, "mode": mode}, trust_env=False, timeout=60)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]


@pytest.fixture
def served(spawn, own_cache, tmp_path):
    """A deployment that has answered something: its process, and the gateway's URL."""
    serve = free_address()
    config = tmp_path / "specq.toml"
    config.write_text(f'[serve]\nbind = "{serve}"\n')
    arguments = ("--serve", "--model", "tiny", "--drafters", "1", "--broker", free_address(), "--config", str(config))
    process, url = spawn("up", *arguments), serve.replace("tcp", "http")
    wait_until(lambda: is_ok(f"{url}/ready"), READY_S)
    complete(url)
    return process, url


@pytest.fixture
def query(spawn, served, tmp_path) -> Callable[[str], list[dict[str, Any]]]:
    """Ask a Prometheus that runs with the file in configs/, its target and interval changed."""
    program("prometheus")
    _, url = served
    address = free_address().removeprefix("tcp://")
    text = (CONFIGS / "prometheus.yml").read_text().replace("127.0.0.1:8000", url.removeprefix("http://"))
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace("scrape_interval: 5s", "scrape_interval: 1s"))
    options = (f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address={address}")
    spawn(*options, program=("prometheus",))
    wait_until(lambda: is_ok(f"http://{address}/-/ready"), SCRAPED_S)

    def ask(expression: str) -> list[dict[str, Any]]:
        answer = get(f"http://{address}/api/v1/query", params={"query": expression})
        assert answer is not None
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return answer.json()["data"]["result"]

    wait_until(lambda: bool(ask("up == 1")), SCRAPED_S)
    return ask


def value(result: list[dict[str, Any]]) -> float:
    return float(result[0]["value"][1]) if result else float("nan")


def queries() -> list[str]:
    """Return the dashboard's queries, with what Grafana puts in for its variables, and those of the autoscalers."""
    board = json.loads((CONFIGS / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((CONFIGS / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    scaling = [rule["metricsQuery"] for rule in rules]
    return [*scaling, *(query.replace("$instance", ".*").replace("$__rate_interval", "30s") for query in found)]


def test_prometheus_accepts_what_is_shown(served):
    """Its own linter finds nothing but the colons of vLLM's names."""
    text = httpx2.get(f"{served[1]}/metrics", trust_env=False).text
    lint = [program("promtool"), "check", "metrics"]
    whole = subprocess.run(lint, input=text, capture_output=True, text=True, check=False)
    families = re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)
    own = "".join(family for family in families if not family.startswith("# HELP vllm:"))
    ours = subprocess.run(lint, input=own, capture_output=True, text=True, check=False)

    assert "specq_step_seconds_bucket" in own
    assert (ours.returncode, ours.stdout + ours.stderr) == (0, "")
    assert all(
        re.fullmatch(r"vllm:\w+ metric names should not contain ':'", line) for line in whole.stderr.splitlines()
    )


def test_prometheus_scrapes_all_and_answers_the_dashboard(served, query):
    """Each query is understood, and those have an answer for which something has happened."""
    _, url = served
    complete(url)
    wait_until(lambda: value(query("sum(specq_completion_tokens_total)")) == 2 * BODY["max_tokens"], SCRAPED_S)
    wait_until(lambda: value(query("sum(rate(specq_step_seconds_count[30s]))")) > 0, SCRAPED_S)

    assert value(query('specq_worker_ready{worker="target-1"}')) == 1
    assert value(query('vllm:generation_tokens_total{model_name="tiny"}')) == 2 * BODY["max_tokens"]
    assert value(query("histogram_quantile(0.5, rate(vllm:time_to_first_token_seconds_bucket[30s]))")) > 0
    unanswered = queries()

    def are_answered() -> bool:
        """Whether all have an answer by now: a rate needs two scrapes since the series began. With `sync` the drafter
        is waited for, so that drafts are certain; with `async` it is measured which sources pay."""
        complete(url, "sync")
        complete(url, "async")
        unanswered[:] = [asked for asked in unanswered if not query(asked)]
        return not unanswered

    with contextlib.suppress(AssertionError):
        wait_until(are_answered, SCRAPED_S)
    assert not unanswered


def test_counters_go_on_when_a_verifier_is_started_again(served, query):
    """What the broker counts never falls; what the verifier counts begins anew, which Prometheus sees as a reset."""
    process, url = served
    wait_until(lambda: value(query('specq_worker_steps_total{worker="target-1"}')) > 5, SCRAPED_S)
    (number,) = re.findall(r"^target-1 +process (\d+)", process.output.read_text(), re.MULTILINE)
    os.kill(int(number), signal.SIGKILL)
    wait_until(lambda: value(query("specq_workers_lost_total")) == 1, SCRAPED_S)
    wait_until(lambda: value(query('specq_worker_ready{worker="target-1"}')) == 1, READY_S)
    complete(url)
    wait_until(lambda: value(query("sum(specq_completion_tokens_total)")) == 2 * BODY["max_tokens"], SCRAPED_S)

    assert value(query('resets(specq_worker_steps_total{worker="target-1"}[10m])')) == 1
    assert value(query("max(resets(specq_rounds_total[10m]))")) == 0
    assert value(query("sum(increase(specq_source_sent_tokens_total[10m]))")) >= 0

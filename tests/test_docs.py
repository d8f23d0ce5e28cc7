"""The pages are true: links lead somewhere, what follows from the code is up to date, and the Python shown runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from specq.client.parameters import LINE_OPTIONS, NAMES
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.runtime import Table
from tests.each import each

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("specq/**/*.md"),
    )
)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def text_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return BLOCK.sub("", page.read_text("utf-8"))


@cache
def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each("page", PAGES)
def test_links_lead_somewhere(page: str):
    here, wrong = ROOT / page, []
    for target, anchor in LINK.findall(text_of(here)):
        if "://" in target or target.startswith("mailto:"):
            continue
        there = (here.parent / target).resolve() if target else here
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert wrong == []


def test_the_link_checker_sees_links():
    """A checker that finds no links would pass."""
    assert sum(len(LINK.findall(text_of(ROOT / page))) for page in PAGES) > 100


def test_reference_pages_follow_from_the_code():
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "write_reference.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_every_parameter_of_a_job_is_in_the_reference():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "jobs.md").read_text("utf-8")))
    assert {*NAMES, *LINE_OPTIONS, "explain"} <= named


@each(("section", "table"), [("target", ENGINES), ("draft", DRAFTERS)])
def test_every_key_of_an_engine_or_proposer_is_in_the_reference(section: str, table: Table):
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8")
    for name in table:
        keys = [f.name for f in fields(table.resolve(name).options) if not f.metadata["is_hidden"]]
        own = text.partition(f"## [{section}.{name}]")[2].partition("## [")[0]
        assert [key for key in keys if f"`{key}`" not in own] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


def test_every_page_of_docs_is_in_the_sites_contents():
    """mkdocs says so too, where the site is built."""
    contents = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob("**/*.md")]
    missing = [name for name in listed if name not in contents]
    assert missing == []


def test_costs_in_the_guide_follow_from_the_measured_rates():
    """A million tokens cost, where an hour costs P: P * 10^6 / (3600 R)."""
    page = (ROOT / "docs" / "guides" / "cluster.md").read_text("utf-8")
    own, far = (
        json.loads((ROOT / "docs" / "results" / f"{name}_h200_third.json").read_text()) for name in ("own", "far")
    )
    rows = [row for row in page.splitlines() if re.fullmatch(r"\|.*\|(?: [\d,.]+ \| [\d.]+ P \|){2}", row)]
    names = ((own, "own plain"), (own, "own async"), (far, "far async 1 ms"), (far, "far async 20 ms"))
    for row, (results, name) in zip(rows, names, strict=True):
        cells = row.split("|")[2:6]
        for sessions, rate, cost in ((1, *cells[:2]), (64, *cells[2:])):
            measured = results["figures"][f"{name} S={sessions}"]["median"]
            assert float(rate.replace(",", "")) == measured
            assert float(cost.replace("P", "")) == pytest.approx(1e6 / 3600 / measured, rel=0.01)

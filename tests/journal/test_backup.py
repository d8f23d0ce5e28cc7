"""The commands of docs/guides/cluster.md that back up a journal in use, and restore it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specq.journal import Opening, check_journal, open_journal
from specq.journal.interface import Journal
from specq.testing.fake_journal import added, ended, taken
from specq.testing.waiting import wait_until

TAKEN_S = 20  # the lease of the broker that had the jobs ends first
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "cluster.md"


def command(beginning: str, **places: str) -> list[str]:
    """Return the guide's command that begins like this, with these places instead of the guide's."""
    (line,) = [line.strip() for line in GUIDE.read_text().splitlines() if line.startswith(f"    {beginning}")]
    for place, here in places.items():
        assert place in line
        line = line.replace(place, here)
    return shlex.split(line)


def begin(journal: Journal) -> None:
    """Write a job that has ended and one that runs."""
    journal.write([taken(1), added(1, 0, [5, 6]), ended(1, [5, 6]), taken(2), added(2, 0, [7])])


def check(address: str) -> None:
    """The copy has what the journal had then, and a broker goes on from it."""
    report = check_journal(address)
    assert (report.num_faults, report.num_unfinished, report.num_results) == (0, 1, 1)
    restored = open_journal(address, Opening(owner="restored"))
    wait_until(lambda: [job.submit.job_id for job in restored.take()] == [2], TAKEN_S)
    restored.write([added(2, 1, [8]), ended(2, [7, 8])])
    reader = restored.reader()
    assert [line.job_id for line in reader.finished(10)] == [2, 1]
    assert reader.find(2).num_tokens == 2
    reader.close()
    restored.close()


def test_a_file(tmp_path: Path):
    journal = open_journal(str(tmp_path / "journal"), Opening(owner="broker"))
    begin(journal)

    _, *arguments = command("python3 -c ", JOURNAL=str(tmp_path / "journal"), COPY=str(tmp_path / "copy"))
    subprocess.run([sys.executable, *arguments], check=True, timeout=100)

    journal.write([added(2, 1, [9, 9])])  # not in the copy
    journal.close()
    for ending in ("-wal", "-shm"):
        (tmp_path / f"journal{ending}").unlink(missing_ok=True)
    (tmp_path / "copy").replace(tmp_path / "journal")
    check(str(tmp_path / "journal"))


@pytest.mark.cluster
def test_a_database(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.journal.cluster import BIN

    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    source, target = cluster.new_database(), cluster.new_database()
    journal = open_journal(source.address, Opening(owner="broker"))
    begin(journal)

    place, dump = "postgresql://specq@db.example.org/specq", {"specq.dump": str(tmp_path / "dump")}
    subprocess.run(command("pg_dump ", **dump, **{place: source.address}), check=True, timeout=100)

    journal.write([added(2, 1, [9, 9])])
    journal.close()
    subprocess.run(command("pg_restore ", **dump, **{place: target.address}), check=True, timeout=100)
    check(target.address)

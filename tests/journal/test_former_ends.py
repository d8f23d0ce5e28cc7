"""A journal of cb5a1ef, whose models' files name more ends of a text than it read: its jobs end as they would have
ended there.

See tests/journal/former_ends.py.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from specq.engines.checkpoint import describe
from tests.journal.former_ends import JOBS, MODELS, TURN_END, WAIT_S, Service, job_id, make_models

OLD = Path(__file__).parent / "cb5a1ef.journal.gz"
EXPECTED = {
    int(job): entry for job, entry in json.loads(Path(__file__).parent.joinpath("cb5a1ef.json").read_text()).items()
}
BEGUN = [job_id(model, number) for model in MODELS for number in (1, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@contextmanager
def started(journal: Path) -> Iterator[Service]:
    """Run a broker that goes on with a journal; no verifier is there yet."""
    with closing(Service(journal)) as service:
        for job in EXPECTED:
            service.follow(job)
        yield service


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    (tmp_path / "journal").write_bytes(gzip.decompress(OLD.read_bytes()))
    return tmp_path / "journal"


@pytest.fixture
def service(journal: Path) -> Iterator[Service]:
    with started(journal) as service:
        yield service


def join_all(service: Service, models: dict[str, Path]) -> None:
    for model, path in models.items():
        service.join(model, path)


def up_to_end(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(TURN_END) + 1] if TURN_END in token_ids else token_ids


def test_jobs_that_began_end_as_they_would_have_ended(service: Service, models: dict[str, Path]) -> None:
    """Past the end of a turn, which older versions did not read; those that have no token yet end there."""
    join_all(service, models)
    service.run_until(lambda: len(service.finish) == len(EXPECTED))
    for model in MODELS:
        for number in JOBS:
            job, entry = job_id(model, number), EXPECTED[job_id(model, number)]
            fresh = number == 4
            text = up_to_end(entry["token_ids"]) if fresh else entry["token_ids"]
            assert (job, service.tokens[job]) == (job, text)
            assert service.finish[job] == ("stop" if fresh else entry["finish"])
    assert any(TURN_END in EXPECTED[job]["token_ids"][EXPECTED[job]["had"] : -1] for job in BEGUN), "the case is there"


def test_they_remain_bound_to_what_they_began_with(journal: Path, models: dict[str, Path]) -> None:
    """Also when broker and verifiers start again in the midst of it."""
    with started(journal) as service:
        join_all(service, models)
        for _ in range(8):
            service.turn()
        assert any(job not in service.finish for job in BEGUN)
    with started(journal) as service:
        join_all(service, models)
        service.run_until(lambda: len(service.finish) == len(EXPECTED))
        assert [service.tokens[job] for job in BEGUN] == [EXPECTED[job]["token_ids"] for job in BEGUN]


def test_they_wait_for_verifiers_that_are_still_loading(service: Service, models: dict[str, Path]) -> None:
    """Not a second less than `weights_wait_s`; other weights of the same name do not end the wait."""
    for model in MODELS:
        service.join(model, models["gguf" if model != "gguf" else "directory"])
    service.pass_time(WAIT_S - 5)
    waiting = [job for job in BEGUN if EXPECTED[job]["had"] < len(EXPECTED[job]["token_ids"])]
    assert not service.finish.keys() & {*waiting}
    service.pass_time(60)
    assert [service.finish[job][:26] for job in waiting] == ["failed: no verifier of the"] * len(waiting)
    assert all("with the weights" in service.finish[job] for job in waiting)


def test_only_models_with_other_ends_have_another_identity(models: dict[str, Path], journal: Path) -> None:
    """What cb5a1ef called them is in its journal: the fingerprint where the ends are the same, else the former one."""
    with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        bound = dict(connection.execute("SELECT job_id, weights FROM active").fetchall())
    for model, path in models.items():
        overrides = {"gguf_values": "float32"} if model == "gguf" else None
        sizes = {"vocab_size": 352, "max_length": 256, "kv_slots": 1}
        info = describe(path, engine="torch", name="", dtype="float32", overrides=overrides, **sizes)
        before = bound[job_id(model, 1 if model != "unchanged" else 2)].split()[0]
        known = info.fingerprint if model == "unchanged" else info.former_fingerprint
        assert (model, known, info.added_eos_ids) == (model, before, () if model == "unchanged" else (TURN_END,))
        assert info.eos_ids == (0, TURN_END)
        assert (info.fingerprint == before) == (model == "unchanged")

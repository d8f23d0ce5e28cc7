"""Each kind of journal in `specq.journal.interface.JOURNALS` does what a journal must do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specq.journal import Journal, Opening, open_journal
from specq.journal.interface import JOURNALS
from specq.protocol import ConfigError
from specq.testing import JournalConformance, OneBrokerConformance
from tests.journal.kinds import ADDRESSES, KINDS


def test_every_kind_is_tested() -> None:
    assert set(ADDRESSES) == set(JOURNALS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"unknown kind of journal 'papyrus'; known: {', '.join(sorted(JOURNALS))}"):
        open_journal("papyrus://nile/delta", Opening())


def test_an_address_that_is_almost_one_of_a_kind_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"postgresql:/x; write postgresql://"):
        open_journal("postgresql:/x", Opening())
    assert list(tmp_path.iterdir()) == []


class TestConformance(JournalConformance):
    """Of each kind."""

    @pytest.fixture(params=KINDS)
    def make_journal(self, request: pytest.FixtureRequest, tmp_path) -> Callable[[Opening], Journal]:
        return partial(open_journal, ADDRESSES[request.param](tmp_path))


class TestOneBroker(OneBrokerConformance):
    """Of the kinds for one broker."""

    @pytest.fixture
    def make_journal(self, tmp_path) -> Callable[[Opening], Journal]:
        return partial(open_journal, ADDRESSES["sqlite"](tmp_path))

"""Groups that are sent to PostgreSQL before the answer to those before them: in order, each once, whatever fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from specq.journal import Record
from specq.journal.postgres import functions, schema, store
from specq.journal.postgres.arrays import ints
from specq.protocol import JournalBusyError
from specq.testing.fake_journal import FakeJournal, added, ended, groups, history, taken
from tests.journal.cluster import Cluster, Database, ids, texts
from tests.journal.proxy import Proxy

pytestmark = pytest.mark.cluster

Open = Callable[..., store.PostgresJournal]


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    """A proxy of the primary."""
    one = Proxy(cluster.primary.port)
    yield one
    one.close()


def write_until_done(journal: store.PostgresJournal, todo: list[Sequence[Record]]) -> list[frozenset[int]]:
    """Write groups as the broker's thread does: those without an answer again. Return the answers."""
    answers: list[frozenset[int]] = []
    for _ in range(100):
        try:
            answers.extend(journal.write_all(iter(todo[len(answers) :])))
        except JournalBusyError:
            continue
        return answers
    raise AssertionError("the journal is busy for ever")


def test_the_next_group_is_sent_before_the_answer(open_it: Open) -> None:
    """Two are under way, never more. Answers come in order."""
    journal, under_way = open_it(), []

    def given() -> Iterator[Sequence[Record]]:
        for number in range(1, 7):
            under_way.append(len(journal._sent))
            yield [taken(number)]

    assert list(journal.write_all(given())) == [frozenset()] * 6
    assert under_way == [0, 1, 1, 1, 1, 1]
    assert sorted(texts(journal)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_are_lost(open_it: Open, database: Database, proxy: Proxy, seed: int) -> None:
    """Of any of the groups under way: each is in the journal once, in order."""
    rng, fake = random.Random(seed), FakeJournal()
    todo = list(groups(rng, history(rng)))
    for group in todo:
        fake.write(group)
    journal, answers = open_it(database.through(proxy.port)), []
    while len(answers) < len(todo):

        def given() -> Iterator[Sequence[Record]]:
            for group in todo[len(answers) :]:
                if rng.random() < 0.2:
                    proxy.loses = "answers"
                yield group

        try:
            answers.extend(journal.write_all(given()))
        except JournalBusyError:
            proxy.loses = ""
    assert answers == [frozenset()] * len(todo)
    assert journal.unfinished() == fake.unfinished() != []


class Refusing:
    """Lets one group fail in the server."""

    def __init__(self, journal: store.PostgresJournal, number: int) -> None:
        self.journal, self.left, self.send = journal, number, journal._session.send
        journal._session.send = self  # type: ignore[method-assign, assignment]

    def __call__(self, statement: str, values: Any) -> None:
        self.left -= 1
        if self.left == 0:  # an array of another length
            values = (*values[:-1], ints([1, 2, 3]))
        self.send(statement, values)


def fail_one(open_it: Open, number: int) -> None:
    """The group behind it is not written before it, and nothing is doubled."""
    journal = open_it()
    todo = [[taken(1), taken(2)], [added(1, 0, [1])], [added(1, 1, [2]), ended(2, [5])], [added(1, 2, [3])]]
    journal.write(todo[0])
    Refusing(journal, number)
    assert write_until_done(journal, todo[1:]) == [frozenset()] * 3
    assert texts(journal) == {1: [1, 2, 3]}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_group_that_fails(open_it: Open, number: int) -> None:
    fail_one(open_it, number)


def test_planted_group_that_does_not_wait_for_the_one_before_is_caught(
    open_it: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written although that one has failed."""
    careless = functions.WRITE.replace("last_group >= p_after", "p_after >= 0")
    assert careless != functions.WRITE
    steps = tuple(step.replace(functions.WRITE, careless) for step in schema.STEPS)
    prepare = schema.prepare
    monkeypatch.setattr(store, "prepare", lambda one: prepare(one, steps))
    with pytest.raises(AssertionError):
        fail_one(open_it, 1)


def test_jobs_refused_while_answers_are_lost(open_it: Open, database: Database, proxy: Proxy) -> None:
    """Both groups were written, and the broker learns neither answer. It learns all refused jobs later."""
    journal, other = open_it(database.through(proxy.port)), open_it()
    journal.write([taken(1), taken(2), taken(3)])
    database.expire(journal)
    assert ids(other.take()) == [1, 2, 3]
    todo = [[taken(4), added(1, 0, [1])], [added(2, 0, [1])], [taken(5), added(3, 0, [1])]]
    proxy.loses = "answers"
    with pytest.raises(JournalBusyError):
        list(journal.write_all(iter(todo)))
    proxy.loses = ""
    answers = write_until_done(journal, todo)
    assert frozenset().union(*answers) == {1, 2, 3}
    assert {1} <= answers[0]
    assert answers[2] == {3}
    assert sorted(texts(journal)) == [1, 2, 3, 4, 5]


def test_groups_that_are_given_up(open_it: Open) -> None:
    """The writer stops in the middle, for example since it ends. What is under way is given again later."""
    journal = open_it()
    answers = journal.write_all(iter([[taken(1)], [taken(2)], [taken(3)]]))
    assert next(answers) == frozenset()
    answers.close()
    assert write_until_done(journal, [[taken(2)], [taken(3)], [taken(4)]]) == [frozenset()] * 3
    assert sorted(texts(journal)) == [1, 2, 3, 4]

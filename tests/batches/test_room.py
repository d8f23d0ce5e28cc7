"""How many lines are under way."""

from __future__ import annotations

import asyncio

from specq.batches.room import FEW, MOST, LineRoom
from tests.each import each


def report(waiting=0, models=("m",)):
    return {"models": list(models), "loads": {model: {"waiting": waiting, "running": 9} for model in models}}


def take(room, waiting):
    room.take_report(report(waiting))
    room.open(is_open=True)


async def fill(room, count, model="m", owner="a"):
    tasks = [asyncio.create_task(room.take(owner, model, lambda: 0)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


def opened(waiting=0, **options) -> LineRoom:
    room = LineRoom()
    room.take_report(report(waiting, **options))
    room.open(is_open=True)
    return room


async def end(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _grows_while_few_wait():
    room = opened()
    tasks = await fill(room, 200)
    counts = [room.num_under_way]
    for waiting in (0, 0, 0, FEW - 1, FEW, FEW + 5):
        take(room, waiting)
        await asyncio.sleep(0)
        counts.append(room.num_under_way)
    assert counts == [FEW, 32, 48, 72, 73, 73, 73]
    (await tasks[0])(None)  # five too many wait: the next one does not begin
    await asyncio.sleep(0)
    assert room.num_under_way == 72
    await end(tasks)


async def _closed_room_gives_no_places():
    room = LineRoom()
    room.take_report(report())
    tasks = await fill(room, 3)
    assert room.num_under_way == 0
    room.open(is_open=True)
    assert room.num_under_way == 3
    await end(tasks)


async def _never_more_than_most():
    room = opened()
    tasks = await fill(room, MOST + 50)
    for _ in range(100):
        take(room, 0)
    assert room.num_under_way == MOST
    await end(tasks)


async def _models_do_not_block_each_other():
    room = opened(models=("m", "n"))
    room.take_report({"models": ["m", "n"], "loads": {"m": {"waiting": 900, "running": 1}}})
    room.open(is_open=True)
    tasks = await fill(room, 50, "m") + await fill(room, 5, "n") + await fill(room, 50, "no such model")
    assert room._under_way == {"m": FEW, "n": 5, "": FEW}
    await end(tasks)


async def order_of(*waiting):
    """Return the order in which lines (name, owner, priority) begin, while owner a has all places but one."""
    room, order = opened(), []
    first = await fill(room, FEW)

    async def take_place(name, owner, priority):
        give_back = await room.take(owner, "m", lambda: priority)
        order.append(name)
        give_back(None)

    tasks = [asyncio.create_task(take_place(*one)) for one in waiting]
    await asyncio.sleep(0)
    (await first[0])(None)
    await asyncio.gather(*tasks)
    await end(first)
    return order


async def _the_highest_priority_is_next():
    found = await order_of(("low", "a", -99), ("high", "a", 0), ("mid", "a", -50), ("high too", "a", 5))
    assert found == ["high", "high too", "mid", "low"]


async def _owners_take_turns():
    """Where priorities differ little."""
    found = await order_of(("a", "a", -80), ("b", "b", -99), ("urgent", "a", -1), ("b too", "b", -98))
    assert found == ["urgent", "b", "b too", "a"]


async def _who_leaves_takes_no_place():
    room = opened()
    first = await fill(room, FEW)
    (leaving,) = await fill(room, 1)
    (await first[0])(None)  # the place is given, and its taker leaves before it wakes
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert room.num_under_way == FEW - 1
    await end(first)


@each(
    "scene",
    [
        _grows_while_few_wait,
        _closed_room_gives_no_places,
        _never_more_than_most,
        _models_do_not_block_each_other,
        _the_highest_priority_is_next,
        _owners_take_turns,
        _who_leaves_takes_no_place,
    ],
)
def test_room(scene):
    asyncio.run(scene())

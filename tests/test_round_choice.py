"""Which kind of round runs: the better one, whatever changes."""

from specq.round_choice import MOST_PATIENCE, RoundChoice


class Machine:
    """Rounds that take so long and give so much, drafted for or not."""

    def __init__(self, drafted: tuple[int, float], plain: tuple[int, float]) -> None:
        self.by_kind = {True: drafted, False: plain}
        self.choice = RoundChoice()

    def run(self, count: int, num_sessions: int = 1) -> list[bool]:
        """Return the kinds of so many rounds."""
        kinds = []
        for _ in range(count):
            kinds.append(self.choice.choose(num_sessions))
            self.choice.learn(*self.by_kind[kinds[-1]])
        return kinds


def test_drafted_rounds_that_pay_go_on():
    """Plain ones are tried for a small part of the time."""
    kinds = Machine((5, 0.009), (1, 0.004)).run(2000)
    assert kinds[:10] == [True] * 10
    assert 0 < kinds.count(False) < 100


def test_drafted_rounds_that_cost_more_than_they_bring_end():
    """After the first trial; later trials become rare."""
    kinds = Machine((100, 0.040), (64, 0.010)).run(4000)
    assert kinds[:15] == [True] * 15
    assert kinds[40:].count(True) < 100
    assert kinds[-MOST_PATIENCE:].count(True) <= 8


def test_a_change_is_noticed():
    """Drafts that become good are taken up again, within the longest patience."""
    machine = Machine((1, 0.009), (1, 0.004))
    machine.run(3000)
    machine.by_kind[True] = (5, 0.009)
    kinds = machine.run(2 * MOST_PATIENCE)
    assert kinds[-50:].count(True) > 40


def test_each_number_of_sessions_is_judged_by_itself():
    """What is right for many says nothing of one."""
    machine = Machine((100, 0.040), (64, 0.010))
    machine.run(500, num_sessions=64)
    assert machine.run(10, num_sessions=1) == [True] * 10


def test_pauses_are_no_rounds():
    """The time in which nothing ran is not held against the round before it."""
    machine = Machine((5, 0.009), (1, 0.004))
    for _ in range(200):
        machine.run(3)
        machine.choice.choose(1)
        machine.choice.pause()
        machine.choice.learn(5, 60.0)
    assert machine.run(30).count(True) > 20

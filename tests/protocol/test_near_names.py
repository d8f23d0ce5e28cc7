"""What is said of a name that is like a known one."""

from specq.protocol import did_you_mean
from tests.each import each


@each(
    ("name", "said"),
    [("smolm2", "did you mean 'smollm2'?"), ("tinny", "did you mean 'tiny'?"), ("something", ""), ("", "")],
)
def test_the_most_alike_name_is_offered(name, said):
    assert did_you_mean(name, {"tiny", "smollm2"}) == said


def test_a_bar_may_be_set_higher_and_of_a_long_name_the_beginning_is_compared():
    """However much there is of it, the answer takes as long."""
    assert did_you_mean("small", ["smollm2"]) == "did you mean 'smollm2'?"
    assert not did_you_mean("small", ["smollm2"], 0.7)
    assert did_you_mean("x" * 64 + "y" * 1000, ["x" * 64])

"""What a broker and its workers say of themselves, made readable.

    report      two reports of a broker as one snapshot, with rates
    sections    a snapshot as rows of text, for `specq status` and `specq top --once`
    screen      the same on a terminal, as it changes (`specq top`), and what is typed meanwhile
    timeline    the trace of a job as text, for `specq trace`, or in the format that Perfetto opens

In: the reports and traces that a client receives. Out: text. All but screen is pure. To show something
more: a function of `sections` that returns a `Section`, and a line in `SECTIONS`.
"""

from specq.observe.report import Snapshot
from specq.observe.sections import SORTS, View, plain
from specq.observe.timeline import chrome, timeline

__all__ = ["SORTS", "Snapshot", "View", "chrome", "plain", "timeline"]

"""Reports and traces of a broker and its workers, in readable form.

    report      two reports of a broker as one snapshot, with rates
    sections    a snapshot as rows of text, for `specq status` and `specq top --once`
    screen      a live view on a terminal, with keys (`specq top`)
    timeline    the trace of a job as text, for `specq trace`, or in the format that Perfetto opens

Input: the reports and traces that a client receives. Output: text. All modules except screen are pure. To show more,
add a function of `sections` that returns a `Section`, and a line in `SECTIONS`.
"""

from specq.observe.report import Snapshot
from specq.observe.sections import SORTS, View, plain
from specq.observe.timeline import chrome, timeline

__all__ = ["SORTS", "Snapshot", "View", "chrome", "plain", "timeline"]

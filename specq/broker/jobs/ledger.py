"""What of the jobs is in the journal.

Each record that goes to the journal has a sequence number; `settle` takes the number up to which all are there, and
returns the jobs that clients may now receive more of. Without a journal every record counts as there at once.
"""

from __future__ import annotations

from collections import deque

from specq.broker.jobs.job import BrokerJob


class Ledger:
    """The records that are on their way to the journal, in order.

    trouble  why the journal cannot be written now, or ""
    full     why the journal has no room for new jobs, or ""
    num_groups, write_s   groups of records that were written so far, and the seconds that it took
    """

    def __init__(self, *, has_journal: bool) -> None:
        self.has_journal = has_journal
        self.sequence = self.settled = 0
        self.trouble = self.full = ""
        self.num_groups, self.write_s = 0, 0.0
        self._marks: deque[tuple[int, BrokerJob, int, bool]] = (
            deque()
        )  # sequence, job, tokens it has by then, has it ended

    def mark(self, job: BrokerJob, *, ended: bool = False) -> int:
        """Return the sequence number for a record of this job as it is now; 0 if it need not go anywhere."""
        if not self.has_journal:
            job.durable.note(job.transcript.num_tokens, ended=ended)
            return 0
        self.sequence += 1
        self._marks.append((self.sequence, job, job.transcript.num_tokens, ended))
        return self.sequence

    def settle(self, sequence: int) -> list[BrokerJob]:
        """Note that the journal holds all records up to this one; return the jobs that it concerns."""
        marks, concerned = self._marks, dict[int, BrokerJob]()
        while marks and marks[0][0] <= sequence:
            _, job, num_tokens, ended = marks.popleft()
            job.durable.note(num_tokens, ended=ended)
            concerned[job.job_id] = job
        self.settled = max(self.settled, sequence)
        return list(concerned.values())

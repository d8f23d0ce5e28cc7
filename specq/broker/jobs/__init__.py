"""Jobs at the broker: taken in, kept in order, sent to their readers.

job          a job; its parts: request, transcript, stats, durable, readers, session, drafters
table        all jobs; fair_queue: whose job is placed next
intake       what clients ask; delivery: what they receive
verdicts     what becomes of a verdict; commits: its tokens; relay: verdicts to drafters
records      a job as records of the journal, and back; ledger: which of them the journal holds
listing      what `specq jobs` shows
"""

"""Jobs at the broker: taken in, kept in order, sent to their readers.

job          what was asked, what is committed, who works on it
table        all jobs; fair_queue: whose job is placed next
intake       what clients ask, and what they receive
commits      a verdict's tokens; relay: verdicts to drafters
ledger       what of the jobs is in the journal; listing: what `specq jobs` shows
"""

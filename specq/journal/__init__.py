"""The journal: what the broker must not forget, in a SQLite file.

    records        what it is told: jobs, their tokens, their ends; and what it gives back
    logprob_rows   log-probabilities as bytes
    schema         tables, and how older files become the newest
    fence          who owns a journal: one broker at a time
    store          the file: groups of records in, unfinished jobs out
    reader         the same file for those who only look: finished jobs, lists
    threads        the two threads that keep the disk out of the broker's loop

Rules: a group of records is journaled whole or not at all, and only by the broker whose fence is the newest. Whatever is
told twice changes nothing: tokens count by position.
"""

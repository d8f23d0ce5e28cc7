"""The broker: routes drafts and verdicts, places sessions on workers, and keeps every job's transcript.

    core        messages in, effects out: the broker without its sockets
    intake      clients: their jobs come in, tokens go out
    placement   workers: sessions to verifiers, drafters to sessions, mending of what was lost
    roster      the workers: who is there, what they run, whether they are alive
    jobs        a job: what was asked, what is committed, who works on it; job_table: all of them
    fair_queue  whose job is placed next
    ledger      what of the jobs is in the journal, so that clients may hear of it
    listing, status, tokenizers   what `specq jobs` and `specq status` show; what clients fetch

Rule: the broker moves integers only; no text, no model, no torch. Time is an argument.
"""

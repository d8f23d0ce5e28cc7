"""The broker: routes drafts and verdicts, places sessions on workers, and keeps every job's transcript.

    core.py     messages in, effects out: the broker without its sockets
    roster.py   the workers: who is there, what they run, whether they are alive
    jobs.py     the jobs: what was asked, what is committed, who works on it
    status.py   what `specq status` shows

Rule: the broker moves integers only; no text, no model, no torch. Time is an argument.
"""

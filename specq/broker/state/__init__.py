"""What the broker knows: values and tables, which its components work on.

memory       all of it together, and the effects that are to be carried out
job          a job; its parts: transcript (text and counts), peers (readers, drafters), traces, lifecycle (states)
table        all jobs, and whose turn it is; ledger: which of their records the journal holds
registry     the registered workers
rights       which key may do what, and how much

Rule: nothing here imports a component (`gate`, `jobs/`, `workers/`, `core`).
"""

"""What the broker does with jobs: taken in, committed, sent to their readers.

intake       what clients ask, and how jobs end; delivery: what they receive
verdicts     what becomes of a verdict: its tokens, what drafters receive of it, its record
reports      what is said of jobs and of the broker: lists, traces, the state
"""

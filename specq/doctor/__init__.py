"""`specq doctor`: is this installation sound, does this pair of models fit, how fast is it here, and how should it be
run?

    checks        one thing looked at: ok, a note, or wrong, and what to do about it
    installation  packages, kernels, cores, memory, GPU, directories, ports
    pair          the models: are they here and whole, do they fit each other and this machine
    engines       the engine that is chosen: can it run this model here; and what vLLM would take
    measuring     the pair in this process, without sockets: what steps and drafts take; watching: what becomes
                  of drafts
    neighbours    what else runs on this machine meanwhile
    prediction    what follows from that for each method and number of sessions: computed, not measured
    serving       a running deployment: are its texts the same with drafts, and how fast is it with them and without
    advice        which command to use here, and why
    examination   all of these in turn; report: its result as text

In: a configuration and numbers of sessions. Out: an `Examination`. To check something more: a function that returns a
`Check`, and its place in `installation.look` or `pair.look`. checks, prediction and advice are pure.

Rule: a prediction is never called a measurement, and where the machine is not quiet, no way of drafting is advised.
"""

from specq.doctor.examination import Examination, Question, examine
from specq.doctor.report import lines
from specq.doctor.serving import examine_service

__all__ = ["Examination", "Question", "examine", "examine_service", "lines"]

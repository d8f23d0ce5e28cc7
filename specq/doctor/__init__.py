"""`specq doctor`: check installation and a model pair, measure its speed here, and recommend a command.

    checks        one check: ok, a note, or wrong, and what to do
    installation  packages, kernels, cores, memory, GPU, directories, ports
    pair          the models: whether they are present and complete, and fit each other and this machine
    engines       the chosen engine: whether it can run this model here; and the needs of vLLM
    measuring     the pair in this process, without sockets: the times of steps and drafts, and the results of drafts
    neighbours    the load from other processes
    prediction    the effect of each method for each number of sessions: computed, not measured
    serving       a running deployment: whether drafts change its texts, and its speed with and without them
    advice        the recommended command, with the reason
    examination   all checks in turn, and their result as text

Input: a configuration and numbers of sessions. Output: an `Examination`. To add a check, add a function that returns a
`Check`. Call it in `installation.look` or `pair.look`. checks, prediction and advice are pure.

Rule: a prediction is never called a measurement. If the machine is busy, no way of drafting is recommended.
"""

from specq.doctor.examination import Examination, Question, examine, lines
from specq.doctor.installation import who_drafts
from specq.doctor.serving import examine_service

__all__ = ["Examination", "Question", "examine", "examine_service", "lines", "who_drafts"]

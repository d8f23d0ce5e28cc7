"""The real broker, verifiers and drafters under a virtual clock, with models and networks that only take time.

    machine       the clock and the queue of what happens; lines between processes: delay, jitter, bandwidth, loss;
                  cores, memory and cache that processes share, and help: how long they compute beside each other
    processes     a verifier's, a drafter's and a client's process: when it hears, computes and sends
    world         a broker, its workers, and the lines between them
    stub_text     what the stub target says, and which of a stub drafter's choices is right
    stubs         a target and a draft model: how long a step or a pass takes, and what comes of it
    settings      a scenario: hardware, network, traffic
    traffic       jobs: so many at a time, or so many a second
    run           a scenario to its figures
    sweep, report   a TOML file to many scenarios, a table, JSON and PNG
    calibration   measured figures to a scenario

Rule: everything that decides is the code that serves; here is only what hardware, networks and users do. A scenario and
its seed determine every figure but those of the simulator's own speed.
"""

from specq.simulate.run import simulate
from specq.simulate.settings import Scenario

__all__ = ["Scenario", "simulate"]

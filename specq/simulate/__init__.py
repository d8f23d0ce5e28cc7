"""The real broker, verifiers and drafters under a virtual clock, with models and networks that only take time.

    machine       the clock and the event queue; lines between processes: delay, jitter, bandwidth, loss; cores, memory
                  and cache that processes share, and help: how long they compute beside each other
    processes     a verifier's, a drafter's and a client's process: when it receives, computes and sends
    world         a broker, its workers, and the lines between them
    stubs         a target and a draft model: the time of a step or a pass, and its result; the target's text
    settings      a scenario: hardware, network, traffic
    run           from a scenario to its figures
    scenarios     from a TOML file to many scenarios, and from measured figures to one
    fleet         several brokers on one journal (`journal`). Light stand-ins: `fleet_workers`, `fleet_verifiers`,
                  `fleet_users`. Results: `fleet_figures`
    figures       jobs, a number at a time or a rate; their rates, times and counts
    report        these as a table, JSON and PNG

Rule: all decisions are made by the code that serves. This package only imitates hardware, networks and users. A
scenario and its seed determine every figure but those of the simulator's own speed.
"""

from specq.simulate.run import simulate
from specq.simulate.settings import Scenario

__all__ = ["Scenario", "simulate"]

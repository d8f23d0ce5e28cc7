"""The parts of `specq bench gpu`: the torch engine and the draft model by themselves, on a pair inflated in memory.

    models      the pair, made when a part first needs it
    parts       the table of parts, and what a part returns
    timing      clocks of the device

    steps       verify steps: the device's time, and the host's work around it
    overlap     a verifier with plain sessions, whose next step is launched before the last one is collected, and without that
    colocated   rounds of a colocated drafter in a verifier, and what the device waits for
    chains      chains of draft steps, and single passes
    heads       an EAGLE-3 head and Medusa heads by themselves: a round's time on the host and on the device
    profile     where a pass's time goes, kernel by kernel
    text        greedy text beside the small pair's, and speculation in one process

Each measures a part of an engine, so it knows the parts of engines. To add one: a file, and a line in `PARTS`.
"""

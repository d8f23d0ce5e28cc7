"""The judge of controllers: what a verifier's controller makes of random services, by a virtual clock.

    python -m tests.verifier.services --set build --out build.json
    python -m tests.verifier.services --set build --before docs/results/services_build.json --out new.json

    service, draw     a service as a value, and the distribution: a pure function of a seed
    texts the output of the target, and what each source foresees of it
    engine, drafters, traffic   the target's device, what drafts, and when jobs begin
    serving           a real verifier in the midst of these: its controller decides, or a choice stays
    candidates        the fixed choices that are worth a comparison
    figures, report   rates in each phase beside plain decoding and the best fixed choice, and a table of many

Rules: a verifier is told and asked by messages and settings alone, so that any controller can be judged. The same seed
gives the same figures. A controller that tries things out is lucky or not, so each service is repeated with another
jitter. What fixed choices bring does not depend on the controller: `--before` takes it from earlier figures.
"""

"""specq on a Ray cluster: Ray starts, places and restarts the processes, and carries no prompt, text or key.

    plan         which process runs on which node, with which arguments; the next step towards a plan. No Ray
    scaling      how many verifiers and draft workers there should be. No Ray
    actors       an actor that runs one specq process on its node
    controller   an actor that compares the plan with what runs, and acts
    deployment   `specq ray up|status|down`: connects, checks the cluster, starts and stops the controller

In: a configuration and the nodes of a cluster. Out: specq processes, which speak ZeroMQ with each other.
To add a role, add it to `ROLES` of `plan`.
"""

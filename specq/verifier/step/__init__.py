"""One step: its plan and the nodes that it verifies, its way through the engine, what it commits, and what is reported
of it."""

"""One step: its plan, its draft nodes, its run in the engine, commit, and report."""

"""One step: its plan, its draft nodes, its run in the engine, its commit, and its report."""

"""One step: its plan, the draft nodes that it verifies, its run in the engine, its commit, and its report."""

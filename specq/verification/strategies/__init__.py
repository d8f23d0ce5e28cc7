"""One file for each strategy: which draft nodes are accepted. The table is `specq.verification.STRATEGIES`."""

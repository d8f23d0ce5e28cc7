"""One file per strategy: it decides which draft nodes are accepted. The table is `specq.verification.STRATEGIES`."""

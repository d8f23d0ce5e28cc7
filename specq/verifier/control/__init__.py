"""What a verifier learns of its steps, and decides by it: what a step costs, which sources of drafts are used, and when
the next step begins."""

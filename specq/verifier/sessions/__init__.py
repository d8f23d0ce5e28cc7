"""The open sessions of a verifier: what is committed, who takes part in the next step, who has room in the engine, and
how drafts come onto their trees."""

"""Forced tokens: where a job's grammar allows one continuation only, it is drafted, also behind other drafts."""

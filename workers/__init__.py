"""Process mains, one a role: a socket loop around one library object. Each `run` returns an exit status."""

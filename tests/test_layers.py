"""The house: which package may import which, through which door, and where the heavy libraries stay."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for package in ("specq", "bench") for path in (ROOT / package).rglob("*.py"))

# Each package, and those that it may import from. There is no circle among them (tested below).
PACKAGES = {
    "protocol": (),
    "config": ("protocol",),
    "runtime": ("protocol", "config"),
    "models": ("protocol", "config", "checkpoints", "engines", "drafting"),
    "transport": ("protocol",),
    "checkpoints": ("protocol",),
    "text": ("protocol", "checkpoints"),
    "journal": ("protocol", "runtime"),
    "verification": ("protocol", "runtime"),
    "grammar": ("protocol", "runtime", "verification"),
    "engines": ("protocol", "config", "runtime", "checkpoints", "text", "verification"),
    "verifier": ("protocol", "config", "runtime", "text", "verification", "grammar", "engines"),
    "drafting": (
        *("protocol", "config", "runtime", "checkpoints", "text", "verification", "grammar", "engines", "verifier"),
    ),
    "proposers": ("verification", "verifier", "drafting"),  # the former name of drafting
    "broker": ("protocol", "config", "transport", "journal", "verification"),
    "client": ("protocol", "config", "runtime", "transport", "text", "verification"),
    "chat": ("protocol", "config", "client"),
    "batches": ("protocol", "runtime", "journal"),
    "gateway": ("protocol", "runtime", "text", "client", "batches"),
    "observe": ("protocol", "runtime", "config"),
    "training": ("protocol", "checkpoints", "text", "engines", "drafting"),
    "simulate": ("protocol", "runtime", "journal", "drafting", "verifier", "broker"),
    "processes": (
        *("protocol", "config", "runtime", "models", "transport", "text", "grammar", "engines", "drafting"),
        *("verifier", "broker", "client", "batches", "gateway"),
    ),
    "ray": ("protocol", "config", "runtime", "transport", "journal", "client", "processes"),
    "samples": ("protocol", "models", "text", "client"),
    "demo": ("protocol", "config", "runtime", "client", "chat", "samples", "processes"),
    "doctor": (
        *("protocol", "config", "runtime", "models", "checkpoints", "transport", "engines", "drafting", "verifier"),
        *("client", "samples", "processes"),
    ),
    "cli": (
        *("protocol", "config", "runtime", "models", "transport", "text", "journal", "verification", "engines"),
        *(
            "drafting",
            "client",
            "chat",
            "gateway",
            "observe",
            "samples",
            "demo",
            "doctor",
            "training",
            "simulate",
            "processes",
            "ray",
        ),
        "bench",  # from a checkout only
    ),
    "bench": (
        *("protocol", "config", "runtime", "models", "checkpoints", "transport", "text", "journal", "verification"),
        *("grammar", "engines", "drafting", "verifier", "client", "simulate", "samples", "processes", "doctor"),
    ),
    "testing": (  # no package may import it
        *(
            "protocol",
            "config",
            "transport",
            "checkpoints",
            "text",
            "journal",
            "verification",
            "engines",
            "drafting",
            "verifier",
        ),
        *("simulate", "processes"),
    ),
}
# Modules beside a package's front door that other packages import by name: those that bring torch or vLLM along, and
# those of packages that only commands use.
DOORS = {
    *(
        "specq.engines.torch",
        "specq.engines.native",
        "specq.engines.models",
        "specq.engines.vllm.client",
        "specq.engines.vllm.options",
        "specq.engines.vllm.spec",
    ),
    "specq.engines.vllm.versions",
    *(
        "specq.verification.ahead",
        "specq.verification.host_kernels",
        "specq.verification.judge",
        "specq.verification.explain",
        "specq.verification.begun",
        "specq.verification.devices",
        "specq.verification.transfers",
        "specq.verification.logprobs",
        "specq.verification.torch_noise",
    ),
    *("specq.verification.noise", "specq.verification.sampling", "specq.verification.drafting"),
    *("specq.checkpoints.draft_form", "specq.verifier.sources", "specq.drafting.worker", "specq.drafting.head_files"),
    *("specq.drafting.medusa.interface", "specq.drafting.trees.interface", "specq.drafting.trees.ranked"),
    *("specq.drafting.interface", "specq.drafting.rank_trees"),
    *(f"specq.drafting.{method}.source" for method in ("draft_model", "suffix", "lookahead")),
    *("specq.drafting.medusa", "specq.drafting.medusa.arrays", "specq.drafting.medusa.network"),  # the former: form
    *("specq.drafting.eagle3", "specq.drafting.eagle3.network", "specq.drafting.eagle3.loading"),
    *("specq.drafting.block", "specq.drafting.block.network", "specq.drafting.head_config"),
    *("specq.drafting.eagle3.levels", "specq.drafting.head_kinds", "specq.drafting.head_layers"),
    "specq.models.draft_choice",
    "specq.models.inflate",
    "specq.models.inflate_heads",
    *("specq.observe.screen", "specq.runtime.machine", "specq.runtime.usage"),
    *(f"specq.journal.postgres.{module}" for module in ("address", "arrays", "schema", "session")),  # need psycopg
    "specq.doctor.hardware",
}
# Who measures the parts of an engine or a drafter, or builds a head's layer of an engine's kernels, knows them.
INSIDERS = {
    "bench.grammars.": ("specq.grammar.", "specq.drafting.", "specq.engines.torch."),
    "bench.host_time": ("specq.engines.torch.", "specq.engines.native."),
    "specq.drafting.eagle3.": ("specq.engines.torch.",),
    "specq.drafting.trees.": ("specq.engines.torch.",),
    "specq.proposers": ("specq.drafting.",),
}
BROKER_ROOMS = ("state", "validation", "workers", "jobs", "gate", "core")  # each imports only from those before it
OPEN = ("training", "bench", "simulate", "processes")  # every module of these is a door
METHODS = ("medusa", "eagle3", "block", "vllm")  # of drafting, those that need torch
HEAVY = {"torch", "transformers", "vllm", "safetensors"}
RUNNERS = {"pytest", "_pytest", "hypothesis"}
HEAVY_HOMES = (
    *("specq/engines/", "specq/verification/", "specq/training/", "specq/models/inflate"),
    *(f"specq/drafting/{method}/" for method in METHODS),
    *("specq/drafting/head_", "specq/drafting/trees/"),
    *("bench/rivals", "bench/drafts", "bench/lossless"),
    *("bench/end_to_end/vllm", "bench/device", "bench/host_time"),
    *("specq/testing/checkpoints", "specq/testing/conformance/", "specq/testing/exact/", "specq/testing/random_steps"),
)
TABLES = (
    *(f"specq/{package}/__init__.py" for package in ("engines", "verification", "training")),
    *(
        f"specq/drafting/{method}/{module}.py"
        for method in METHODS
        for module in ("__init__", "spec", "form", "interface", "source")
    ),
    *(f"specq/drafting/{module}.py" for module in ("medusa/arrays", "medusa/host", "eagle3/arrays", "eagle3/host")),
    "specq/drafting/block/arrays.py",
    *(f"specq/drafting/eagle3/{module}.py" for module in ("remote", "row_head")),
    *(f"specq/drafting/trees/{module}.py" for module in ("__init__", "interface", "source", "grown_trees", "ranked")),
)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {_name(path) for path in MODULES}


class _Found(NamedTuple):
    """What a file says of other modules.

    imports     those that it imports anywhere in it; `from x import y` is x.y where that is a module, else x
    named       those that its `from ... import` lines name
    of_os       the attributes of `os` that it uses
    """

    imports: frozenset[str]
    named: frozenset[str]
    of_os: frozenset[str]


@cache  # several tests read each file, and to parse it is most of what that takes
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def _found(path: Path) -> _Found:
    nodes = list(ast.walk(_tree(path)))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 0 for node in froms), f"{path}: relative import; name the package"
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    both = [(node.module, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
    imports |= {module if module in NAMES else package for package, module in both}
    attributes = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name))
    of_os = {n.attr for n in attributes if n.value.id == "os"}
    return _Found(frozenset(imports), frozenset(node.module for node in froms), frozenset(of_os))


def _package(module: str) -> str | None:
    """Return the package of one of our modules; None for others, and for `specq` itself."""
    parts = module.split(".")
    if parts[0] == "bench":
        return "bench"
    return parts[1] if parts[0] == "specq" and len(parts) > 1 else None


def test_every_package_has_its_place():
    assert {package for name in NAMES if (package := _package(name)) not in (None, "__main__")} == set(PACKAGES)


def test_packages_form_no_circle():
    assert set(TopologicalSorter(PACKAGES).static_order()) == set(PACKAGES)


def test_the_root_holds_no_modules():
    assert {p.name for p in (ROOT / "specq").iterdir() if p.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


def test_packages_import_only_what_they_may():
    beyond = {}
    for path in MODULES:
        package = _package(_name(path))
        if package not in (None, "__main__"):
            others = {other for module in _found(path).imports if (other := _package(module)) not in (None, package)}
            beyond[_name(path)] = others - set(PACKAGES[package])
    assert {name: others for name, others in beyond.items() if others} == {}


def test_no_module_imports_the_toys_of_tests():
    assert [package for package, others in PACKAGES.items() if "testing" in others] == []


def test_only_the_toys_import_what_tests_run_on():
    users = {_name(path) for path in MODULES if RUNNERS & {module.partition(".")[0] for module in _found(path).imports}}

    assert {name for name in users if _package(name) != "testing"} == set()


def test_packages_are_entered_by_their_doors():
    """What stands here must import from the package instead."""
    assert {_name(path): wrong for path in MODULES if (wrong := _beside_the_doors(path))} == {}


def _beside_the_doors(path: Path) -> set[str]:
    """Return the modules of other packages that a file imports by name, and may not."""
    package = _package(_name(path))
    foreign = {module for module in _found(path).named if _package(module) not in (None, package, *OPEN)}
    inside = sum((parts for insider, parts in INSIDERS.items() if _name(path).startswith(insider)), ())
    return {m for m in foreign if m not in DOORS and m.count(".") > 1 and not m.startswith(inside)}


def test_torch_stays_where_it_belongs():
    heavy = {}
    for path in MODULES:
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith(HEAVY_HOMES) or place in TABLES:
            heavy[place] = HEAVY & {module.partition(".")[0] for module in _found(path).imports}
    assert {place: found for place, found in heavy.items() if found} == {}


def test_no_public_class_has_the_name_of_another():
    """The former package's aliases aside, a name that is read anywhere means one thing."""
    places = defaultdict(list)
    for path in MODULES:
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_modules_form_no_circle():
    """Imports inside functions and for annotations count too; a package's front door is no part of its own rooms."""
    graph = {
        _name(path): {
            m for m in _found(path).imports if m in NAMES and m != _name(path) and not _is_front(m, _name(path))
        }
        for path in MODULES
    }

    assert len(list(TopologicalSorter(graph).static_order())) == len(NAMES)


def _is_front(imported: str, importer: str) -> bool:
    return importer.startswith(imported + ".")


def test_the_rooms_of_the_broker_import_one_way():
    """Nothing of the state knows what works on it."""
    wrong = {}
    for path in (ROOT / "specq" / "broker").rglob("*.py"):
        room = f"{_name(path)}.".split(".")[2]
        if room in BROKER_ROOMS:
            others = {m.split(".")[2] for m in _found(path).imports if m.startswith("specq.broker.")}
            wrong[_name(path)] = others - set(BROKER_ROOMS[: BROKER_ROOMS.index(room) + 1])
    assert len(wrong) > len(BROKER_ROOMS)
    assert {name: others for name, others in wrong.items() if others} == {}


def test_only_config_reads_the_environment():
    """The others write to it: for the thread pools that read it when torch is imported, for cuBLAS, and for vLLM."""
    users = {_name(path) for path in MODULES if "environ" in _found(path).of_os}

    writers = {
        "specq.runtime.usage",
        "specq.engines.vllm.options",
        "bench.end_to_end.vllm",
        "bench.rivals.vllm",
    }
    assert users <= {"specq.config.loading", *writers}

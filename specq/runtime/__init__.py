"""The base of a process: cores, logging, compiled kernels, and tables of objects to import.

- usage: cores and threads of a process, its child processes, and the use by other processes.
- log: structlog to standard error; progress of workers at start-up.
- columns: rows of values as text in columns.
- compiler: C kernels, built at first use, and arrays with known addresses.
- whole_files: files that other processes see complete or not at all.
- health_file: a process's state in a file, for probes.
- option_types: types of command-line options.
- table: names to "package.module:object", our own and those of other packages. Extras for optional packages.
- tracing: events of traced jobs, by the broker's clock.
- isolation: an error fails only the session that caused it.
"""

from specq.runtime.columns import columns
from specq.runtime.compiler import (
    Buffer,
    build_ahead,
    find_compiler,
    has_kernels,
    kernel_sources,
    library,
    library_or_reason,
    processor,
)
from specq.runtime.health_file import HealthFile
from specq.runtime.isolation import Faults, in_halves
from specq.runtime.log import Readiness, Tell, teller, traced
from specq.runtime.option_types import Number, OutFile, OutFolder, cannot_write, writing
from specq.runtime.table import EXTRAS, Table, how_to_install, resolve
from specq.runtime.tracing import Tracer
from specq.runtime.usage import apply_cpu, available_cores, available_memory, give_way, reap, usual_threads, wait_asleep
from specq.runtime.whole_files import whole_file

__all__ = [
    "EXTRAS",
    "Buffer",
    "Faults",
    "HealthFile",
    "Number",
    "OutFile",
    "OutFolder",
    "Readiness",
    "Table",
    "Tell",
    "Tracer",
    "apply_cpu",
    "available_cores",
    "available_memory",
    "build_ahead",
    "cannot_write",
    "columns",
    "find_compiler",
    "give_way",
    "has_kernels",
    "how_to_install",
    "in_halves",
    "kernel_sources",
    "library",
    "library_or_reason",
    "processor",
    "reap",
    "resolve",
    "teller",
    "traced",
    "usual_threads",
    "wait_asleep",
    "whole_file",
    "writing",
]

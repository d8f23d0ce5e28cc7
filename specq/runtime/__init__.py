"""What a process stands on: cores, logging, compiled kernels, and objects that are imported only when chosen.

usage       cores and threads of a process, those that it has started, and what others took
log         structlog to standard error; what a worker does before it is ready
columns     rows of values as text in columns
compiler    C kernels, built at first use, and arrays whose addresses they know
whole_files  files that others see whole or not at all
option_types  types of command-line options
table       names to "package.module:object", our own and those of other packages; what brings those that are optional
tracing     what a process notes of traced jobs, by the broker's clock
isolation   an error is a fault of the session that it was raised for, and of no other
"""

from specq.runtime.columns import columns
from specq.runtime.compiler import Buffer, find_compiler, has_kernels, library, library_or_reason, processor
from specq.runtime.isolation import Faults, in_halves
from specq.runtime.log import Readiness, Tell, teller, traced
from specq.runtime.option_types import Number, OutFile, OutFolder, cannot_write, writing
from specq.runtime.table import EXTRAS, Table, how_to_install, resolve
from specq.runtime.tracing import ClockOffset, Tracer
from specq.runtime.usage import apply_cpu, available_cores, give_way, reap
from specq.runtime.whole_files import whole_file

__all__ = [
    "EXTRAS",
    "Buffer",
    "ClockOffset",
    "Faults",
    "Number",
    "OutFile",
    "OutFolder",
    "Readiness",
    "Table",
    "Tell",
    "Tracer",
    "apply_cpu",
    "available_cores",
    "cannot_write",
    "columns",
    "find_compiler",
    "give_way",
    "has_kernels",
    "how_to_install",
    "in_halves",
    "library",
    "library_or_reason",
    "processor",
    "reap",
    "resolve",
    "teller",
    "traced",
    "whole_file",
    "writing",
]

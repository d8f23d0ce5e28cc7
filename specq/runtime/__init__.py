"""What a process stands on: cores, logging, compiled kernels, and objects that are imported only when chosen.

cpu         cores and threads of a process
log         structlog to standard error
progress    what a worker does before it is ready, as lines for who waits
columns     rows of values as text in columns
compiler    C kernels, built at first use
buffer      arrays whose addresses C knows
whole_files  files that others see whole or not at all
packages    those that are optional, and what brings them
option_types  types of command-line options
processes   those that this one has started
table       names to "package.module:object", our own and those of other packages
tracing     what a process notes of traced jobs, by the broker's clock
isolation   an error is a fault of the session that it was raised for, and of no other
"""

from specq.runtime.buffer import Buffer
from specq.runtime.columns import columns
from specq.runtime.compiler import find_compiler, has_kernels, library, library_or_reason, processor
from specq.runtime.cpu import apply_cpu, available_cores, give_way
from specq.runtime.isolation import Faults, in_halves
from specq.runtime.log import traced
from specq.runtime.option_types import Number, OutFile, OutFolder, cannot_write, writing
from specq.runtime.packages import EXTRAS, how_to_install
from specq.runtime.processes import reap
from specq.runtime.progress import Readiness, Tell, teller
from specq.runtime.table import Table, resolve
from specq.runtime.tracing import ClockOffset, Tracer
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

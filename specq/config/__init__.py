"""Configuration: defaults, a TOML file, the environment and the command line become frozen sections.

    sections         one dataclass for each role; every key is also an option of the command
    loading          reads the file and the environment; the only module that does
    engine_options   options that are handed on to an engine as they are
    renamed          old names of keys, which are aliases for one version
    addresses        ZeroMQ addresses as configurations name them

In: a path, variables, options. Out: `Config` and its sections, or ConfigError. To add an option: one line in its section.
"""

from specq.config.addresses import connect_address, free_address
from specq.config.arguments import of_one, to_arguments
from specq.config.engine_options import Options
from specq.config.loading import cache_dir, environment_of_children, journal_address, load, options_of, override
from specq.config.renamed import RENAMED
from specq.config.sections import (
    DEFAULT_BROKER,
    BrokerConfig,
    ClientConfig,
    Config,
    Cores,
    DraftConfig,
    Section,
    TargetConfig,
    UpConfig,
    kinds,
    section_name,
)

__all__ = [
    "DEFAULT_BROKER",
    "RENAMED",
    "BrokerConfig",
    "ClientConfig",
    "Config",
    "Cores",
    "DraftConfig",
    "Options",
    "Section",
    "TargetConfig",
    "UpConfig",
    "cache_dir",
    "connect_address",
    "environment_of_children",
    "free_address",
    "journal_address",
    "kinds",
    "load",
    "of_one",
    "options_of",
    "override",
    "section_name",
    "to_arguments",
]

"""Configuration: merges defaults, a TOML file, the environment and the command line into frozen sections.

    sections         one dataclass for each role; each key is also a command-line option
    options          a section, and its fields: their defaults, help texts and allowed values
    loading          reads the file and the environment (no other module does); engine and proposer options;
                     renamed keys
    engine_options   options as name=value, values in JSON
    values           parses addresses and draft trees in text form

In: a path, environment variables, options. Out: `Config` and its sections, or ConfigError. To add an option, add one
line to its section.
"""

from specq.config.engine_options import Options, parsed
from specq.config.loading import (
    RENAMED,
    OwnOptions,
    batch_store,
    broker_address,
    cache_dir,
    environment_of_children,
    health_path,
    journal_address,
    load,
    of_one,
    options_of,
    override,
    own_options,
    ray_address,
    read_own,
    state_dir,
    to_arguments,
    wants_colours,
    with_new_names,
    with_own,
)
from specq.config.options import Cores, Section, Texts, hidden, kinds, option, section_name
from specq.config.ray import RayConfig
from specq.config.sections import (
    AUTO_DRAFTERS,
    DEFAULT_BROKER,
    DURABILITIES,
    NO_ADDRESS,
    NO_MODEL,
    OWN_HEADS,
    BrokerConfig,
    ClientConfig,
    Config,
    DraftConfig,
    ServeConfig,
    TargetConfig,
    UpConfig,
)
from specq.config.values import check_bind, check_connect, connect_address, free_address, read_tree

__all__ = [
    "AUTO_DRAFTERS",
    "DEFAULT_BROKER",
    "DURABILITIES",
    "NO_ADDRESS",
    "NO_MODEL",
    "OWN_HEADS",
    "RENAMED",
    "BrokerConfig",
    "ClientConfig",
    "Config",
    "Cores",
    "DraftConfig",
    "Options",
    "OwnOptions",
    "RayConfig",
    "Section",
    "ServeConfig",
    "TargetConfig",
    "Texts",
    "UpConfig",
    "batch_store",
    "broker_address",
    "cache_dir",
    "check_bind",
    "check_connect",
    "connect_address",
    "environment_of_children",
    "free_address",
    "health_path",
    "hidden",
    "journal_address",
    "kinds",
    "load",
    "of_one",
    "option",
    "options_of",
    "override",
    "own_options",
    "parsed",
    "ray_address",
    "read_own",
    "read_tree",
    "section_name",
    "state_dir",
    "to_arguments",
    "wants_colours",
    "with_new_names",
    "with_own",
]

"""Configuration: defaults, a TOML file, the environment and the command line become frozen sections.

    sections         one dataclass for each role; every key is also an option of the command
    options          a field of a section: its default, help text, what its value may be
    loading          reads the file and the environment; the only module that does
    engine_options   options as name=value, values in JSON
    own_options      options that only one engine or proposer knows, declared beside it
    renamed          old names of keys, which are aliases for one version
    trees            trees of drafts as people write them down
    addresses        which addresses a configuration may name

In: a path, variables, options. Out: `Config` and its sections, or ConfigError. To add an option: one line in its
section.
"""

from specq.config.addresses import check_bind, check_connect, connect_address, free_address
from specq.config.arguments import of_one, to_arguments
from specq.config.engine_options import Options, parsed
from specq.config.loading import (
    cache_dir,
    environment_of_children,
    journal_address,
    load,
    override,
    state_dir,
    wants_colours,
)
from specq.config.options import Cores, Texts, hidden, option
from specq.config.own_options import OwnOptions, options_of, own_options, read_own, with_own
from specq.config.renamed import RENAMED, with_new_names
from specq.config.sections import (
    AUTO_DRAFTERS,
    DEFAULT_BROKER,
    DURABILITIES,
    BrokerConfig,
    ClientConfig,
    Config,
    DraftConfig,
    Section,
    ServeConfig,
    TargetConfig,
    UpConfig,
    kinds,
    section_name,
)
from specq.config.trees import read_tree

__all__ = [
    "AUTO_DRAFTERS",
    "DEFAULT_BROKER",
    "DURABILITIES",
    "RENAMED",
    "BrokerConfig",
    "ClientConfig",
    "Config",
    "Cores",
    "DraftConfig",
    "Options",
    "OwnOptions",
    "Section",
    "ServeConfig",
    "TargetConfig",
    "Texts",
    "UpConfig",
    "cache_dir",
    "check_bind",
    "check_connect",
    "connect_address",
    "environment_of_children",
    "free_address",
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
    "read_own",
    "read_tree",
    "section_name",
    "state_dir",
    "to_arguments",
    "wants_colours",
    "with_new_names",
    "with_own",
]

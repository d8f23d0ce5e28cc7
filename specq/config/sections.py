"""The sections of a configuration: frozen dataclasses, one for each role; a constructor takes its own section, not the
whole.

A value is checked when a section is made, wherever it came from. To add an option: one line in its section; file,
checks and command line follow.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from specq.config.engine_options import Options
from specq.config.options import Cores, Tables, Texts, check_limits, check_type, hidden, option
from specq.config.values import check_bind, check_connect, check_origins, read_address
from specq.protocol import ConfigError

DEFAULT_BROKER = "tcp://127.0.0.1:5750"
DURABILITIES = ("full", "process")
AUTO_DRAFTERS = -1
VOCABULARIES = ("same", "shared", "text")
DTYPES = ("auto", "float32", "bfloat16", "float16")


# --- options of several sections ------------------------------------------------------------------------------------


def _broker() -> str:
    return option(DEFAULT_BROKER, "address of the broker to connect to", check=check_connect)


def _keys() -> str:
    return option("", "directory of CURVE keys (specq keys), or DIRECTORY/NAME of one's own; empty: no encryption")


def _insecure() -> bool:
    return option(default=False, text="listen beyond this machine without keys")


def _drain() -> float:
    return option(5.0, "seconds that what runs may take to end or to go elsewhere, after SIGTERM", high=86_400)


def _name() -> str:
    return option("", "how it is called in logs and statistics; empty: made from role and process id")


def _progress() -> bool:
    return option(default=False, text="say what is loaded and measured before the worker is ready")


def _model() -> str:
    return option(
        "", "a name of `specq models`, a directory in Hugging Face layout, a GGUF file, or a hub name; empty: smollm2"
    )


def _vocabulary() -> str:
    return option(
        "same",
        "of a draft model with another tokenizer than the target's: same: it is refused; shared: only tokens that "
        "both have are drafted; text: its drafts are turned into text, and that into tokens of the target",
        choices=VOCABULARIES,
    )


def _device() -> str:
    return option("auto", "cpu, cuda, cuda:1, mps; auto: a GPU where there is one")


def _dtype() -> str:
    return option("auto", "number format of the weights; auto: float32 on a CPU", choices=DTYPES)


def _kv_slots() -> int:
    return option(0, "tokens that the KV memory holds; 0: chosen by what runs the model")


def _engine_options() -> Options:
    return option((), "further options of what runs the model, name=value; vLLM: arguments of EngineArgs")


def _cores() -> Cores:
    return option((), "CPU ids to stay on, as in 0,2-3; none: anywhere")


def _threads() -> int:
    return option(0, "compute threads; 0: as many as the cores given, else as the library likes", high=4096)


def _check_slowdown(key: str, value: float) -> None:
    if 0 < value < 1:
        raise ConfigError(f"{key} is {value:g}; give at least 1, as in 1.8, or 0 for no limit")


# --- the sections ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Section:
    """Base of the sections: checks every value's type and range, and what else its option says."""

    def __post_init__(self) -> None:
        for f in fields(self):
            key, value = f"{section_name(type(self))}.{f.name}", getattr(self, f.name)
            check_type(key, value, kinds(type(self))[f.name])
            check_limits(key, value, f.metadata)


@dataclass(frozen=True, slots=True)
class BrokerConfig(Section):
    """The broker."""

    bind: str = option(DEFAULT_BROKER, "address to listen on")
    heartbeat_ms: int = option(500, "how often workers shall beat", low=10, high=60_000)
    liveness_ms: int = option(3000, "silence after which a worker is taken for dead", low=20, high=600_000)
    max_jobs: int = option(10_000, "jobs that may wait or run at a time", low=1)
    drafters_per_job: int = option(2, "draft workers at most for one job, no two of the same model", high=8)
    journal: str = option(
        "",
        "file that outlives the broker, or KIND://...; none: memory only; empty: one for each address, in SPECQ_STATE",
    )
    durability: str = option("full", "full: survives loss of power; process: only of the process", choices=DURABILITIES)
    keep_hours: float = option(168.0, "how long results are kept", low=0.0, high=1e6)
    keep_mb: int = option(
        1024, "megabytes that the journal takes at most; the oldest results go, then no new jobs are taken", high=2**40
    )
    traced_jobs: int = option(
        2, "jobs at a time that specq trace shows in every process though they did not ask for it", high=1024
    )
    weights_wait_seconds: float = option(
        600.0,
        "how long a job waits for its model's weights when no verifier has them, then fails; 0: for ever",
        high=1e9,
    )
    take_over: bool = option(
        default=False, text="take the journal from a broker that hangs; that one stops when it wakes"
    )
    drain_seconds: float = _drain()
    cores: Cores = _cores()
    keys: str = _keys()
    insecure: bool = _insecure()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_bind(self)
        if self.liveness_ms < 2 * self.heartbeat_ms:
            raise ConfigError(
                f"broker.liveness_ms is {self.liveness_ms}; it must be at least twice heartbeat_ms "
                f"({self.heartbeat_ms})"
            )


@dataclass(frozen=True, slots=True)
class TargetConfig(Section):
    """A target verifier."""

    broker: str = _broker()
    model: str = _model()
    engine: str = option("torch", "what runs the model")
    name: str = _name()
    progress: bool = _progress()
    bind: str = option("tcp://127.0.0.1:*", "address to listen on for the broker; port *: any free one")
    advertise: str = option("", "address the broker shall connect to; empty: the one bound")
    device: str = _device()
    dtype: str = _dtype()
    threads: int = _threads()
    cores: Cores = _cores()
    kv_slots: int = _kv_slots()
    engine_options: Options = _engine_options()
    own: Tables = hidden()
    max_sessions: int = option(64, "sessions in flight", low=1, high=65_536)
    max_step_rows: int = option(512, "most rows (tokens and draft nodes) in one forward pass", low=1, high=65_536)
    max_prefill_slowdown: float = option(
        1.8,
        "how many times as long a step may become by the prompts that it computes beside sessions that generate; at "
        "least 1; 0: no limit",
        high=1e6,
        check=_check_slowdown,
    )
    max_prefill_rows: int = option(
        0,
        "most rows of a forward pass that computes prompts, if more than max_step_rows; 0: what suits the engine",
        high=65_536,
    )
    trust_drafts: bool = option(
        default=True, text="believe what drafters say their tokens were sampled from; else judge each as a point mass"
    )
    prompt_lookup: str = option(
        "suffix",
        "what drafts from texts that are there: suffix (what a text repeats) or none",
        choices=("suffix", "none"),
    )
    shared_tokens: int = option(
        0,
        "tokens of ended jobs from which later jobs of the same key are drafted for, of all keys; 0: none",
        high=10**9,
    )
    lookahead: bool = option(
        default=False, text="also draft n-grams that the target gives in further rows of its steps (lookahead decoding)"
    )
    lookahead_window: int = option(15, "its columns at most (W); fewer where their rows are not free", low=1, high=256)
    lookahead_ngram: int = option(5, "tokens of its n-grams (N); a column has one row less", low=2, high=32)
    lookahead_guesses: int = option(0, "n-grams that it drafts at most (G); 0: as many as there are columns", high=256)
    drafts: str = option(
        "measured",
        "measured: drafters, lookups and draft_model are used where they raise tokens a second; always: they are used "
        "anyway",
        choices=("measured", "always"),
    )
    draft_model: str = option("", "a draft model that drafts in this process, on the same device; empty: none")
    vocabulary: str = _vocabulary()
    heads: str = option(
        "",
        "Medusa heads, or an EAGLE-3 head, that draft in this process from the target's hidden states: a directory, or "
        "a name of `specq models`; empty: none",
    )
    heads_tree: str = option(
        "",
        "the tree that heads draft, as paths of ranks or a file of them; empty: best first, by their probabilities",
    )
    fan_out: int = option(3, "children at each level that this process drafts, for few sessions", low=1, high=8)
    chain: int = option(8, "most levels that this process drafts for a step", low=1, high=32)
    drain_seconds: float = _drain()
    verbose: bool = option(default=False, text="log each drafted node with what was decided, and all else (debug)")
    keys: str = _keys()
    insecure: bool = _insecure()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_bind(self)
        if self.advertise:
            check_connect("target.advertise", self.advertise)
        elif read_address("target.bind", self.bind).is_wildcard:
            raise ConfigError(
                f"target.bind is {self.bind}, which is not an address to connect to; set advertise to one"
            )
        if self.heads_tree and not self.heads:
            raise ConfigError(
                "target.heads_tree is given without target.heads; name the heads that shall draft such trees"
            )


@dataclass(frozen=True, slots=True)
class DraftConfig(Section):
    """A draft worker."""

    broker: str = _broker()
    model: str = _model()
    proposer: str = option("draft-model", "what makes the drafts")
    heads: str = option(
        "",
        "Medusa heads of its model, with which it decodes: the same drafts in fewer passes; a directory; empty: none",
    )
    vocabulary: str = _vocabulary()
    target: str = option(
        "",
        "the target, named as `model`: vocabulary shared and text need its tokenizer, proposer eagle3 its sizes and "
        "its embedding; empty: unknown",
    )
    keys: str = _keys()
    name: str = _name()
    progress: bool = _progress()
    device: str = _device()
    dtype: str = _dtype()
    threads: int = _threads()
    cores: Cores = _cores()
    kv_slots: int = _kv_slots()
    engine_options: Options = _engine_options()
    own: Tables = hidden()
    width: int = option(8, "nodes expanded in one pass; chains: two, or one a session", low=1, high=1024)
    fan_out: int = option(3, "children of an expanded node", low=1, high=64)
    max_ahead: int = option(32, "most tokens drafted ahead of what is committed", low=1, high=1024)
    chain: int = option(6, "levels drafted in one call, on a GPU", low=1, high=32)
    distribution_size: int = option(
        32, "tokens of a draft distribution that travels with drafts under probabilistic", low=1, high=1024
    )
    nice: int = option(
        19, "added to the process's niceness once it is ready; 19: run only where nothing else wants to", high=19
    )


@dataclass(frozen=True, slots=True)
class UpConfig(Section):
    """What `specq up` starts."""

    targets: int = option(1, "target verifiers to start", low=1, high=256)
    drafters: int = option(
        AUTO_DRAFTERS,
        "draft workers to start; -1: who drafts where is chosen for this machine",
        low=AUTO_DRAFTERS,
        high=1024,
    )
    serve: bool = option(default=False, text="also serve OpenAI's HTTP API (section serve)")


@dataclass(frozen=True, slots=True)
class ClientConfig(Section):
    """A client."""

    broker: str = _broker()
    keys: str = _keys()
    timeout_s: float = option(10.0, "seconds to wait for the broker to answer", low=0.001, high=86_400)


@dataclass(frozen=True, slots=True)
class ServeConfig(Section):
    """The gateway: OpenAI's HTTP API in front of a broker."""

    broker: str = _broker()
    keys: str = _keys()
    bind: str = option("tcp://127.0.0.1:8000", "address to listen on for HTTP")
    api_keys: str = option("", "file of API keys (specq keys api); empty: everyone may ask")
    tls_cert: str = option("", "certificate file, PEM; empty: no TLS")
    tls_key: str = option("", "its private key, PEM")
    hosts: str = option("", "names by which clients may call it, separated by commas, besides localhost and addresses")
    cors_origins: Texts = option(
        Texts(()),
        "origin (https://chat.example.org) whose pages may ask from a browser; * for all; may be repeated; none: no "
        "page but the gateway's own",
        check=check_origins,
    )
    insecure: bool = option(default=False, text="listen beyond this machine without API keys or without TLS")
    timeout_s: float = option(10.0, "silence of the broker after which requests fail", low=0.001, high=86_400)
    total_seconds: float = option(3600.0, "most seconds that a request may take in all", low=0.001, high=86_400)
    idle_seconds: float = option(60.0, "seconds that a connection may be idle between requests", low=1, high=86_400)
    header_seconds: float = option(10.0, "seconds that a client may take for its headers", low=0.001, high=86_400)
    body_seconds: float = option(30.0, "seconds that a client may take for its body", low=0.001, high=86_400)
    body_kb: int = option(1024, "kilobytes that a body may have", low=1, high=1_048_576)
    header_kb: int = option(32, "kilobytes that the headers may have", low=1, high=1024)
    connections: int = option(4096, "connections at a time", low=1, high=65_536)
    requests_per_key: int = option(
        1024, "requests of one API key at a time (of all callers where there are no keys)", low=1
    )
    drain_seconds: float = _drain()
    cores: Cores = _cores()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_http(self)


def _check_http(section: ServeConfig) -> None:
    """Raise ConfigError for an address that HTTP cannot use, or that others reach without keys and TLS."""
    bind = read_address("serve.bind", section.bind)
    if not bind.is_tcp:
        raise ConfigError(f"serve.bind is {section.bind}; HTTP takes tcp://HOST:PORT")
    if bool(section.tls_cert) != bool(section.tls_key):
        raise ConfigError("serve.tls_cert and serve.tls_key go together; give both or neither")
    missing = [name for name in ("api_keys", "tls_cert") if not getattr(section, name)]
    if missing and not section.insecure and not bind.is_local:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(
            f"serve.bind is {section.bind}, which others can reach: give {flags} (docs/http-api.md), bind 127.0.0.1, "
            f"or allow it with --insecure of specq serve, or `insecure = true` in [serve] of a --config, which specq "
            f"up reads too"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """All sections: what one file holds."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    up: UpConfig = field(default_factory=UpConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)


_ALL = (BrokerConfig, TargetConfig, DraftConfig, UpConfig, ClientConfig, ServeConfig)
SECTIONS: dict[str, type[Section]] = dict(zip(Config.__dataclass_fields__, _ALL, strict=True))


def section_name(section: type[Section]) -> str:
    """Return the name that a section has in files."""
    return next((name for name, cls in SECTIONS.items() if cls is section), getattr(section, "LABEL", section.__name__))


def kinds(section: type[Section]) -> dict[str, Any]:
    """Return the type of each key of a section."""
    hashable: Any = section  # a type always is, whatever mypy thinks of those whose values are not
    return _hints(hashable)


@cache  # it is asked for each key of a section, and takes as long as all of them
def _hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _check_bind(section: BrokerConfig | TargetConfig) -> None:
    """Raise ConfigError unless the section may listen at its address."""
    key = f"{section_name(type(section))}.bind"
    check_bind(key, section.bind, insecure=section.insecure or bool(section.keys))

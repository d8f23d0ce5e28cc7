"""The sections of a configuration: one frozen dataclass for each role.

Rule: a constructor takes its own section, not the whole configuration.

A section checks its values when it is created, from any origin. To add an option, add one line to its section.
The file format, the checks and the command line follow from it. The help text states what the option does, its unit and
its special values. `--help` appends the default, unless it is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specq.config.engine_options import Options
from specq.config.options import Cores, Section, Tables, Texts, hidden, kinds, option, section_name
from specq.config.ray import RayConfig
from specq.config.values import check_bind, check_brokers, check_connect, check_origins, read_address
from specq.protocol import ConfigError

DEFAULT_BROKER = "tcp://127.0.0.1:5750"
DURABILITIES = ("full", "process")
AUTO_DRAFTERS = -1
NO_MODEL, MTP = "none", "mtp"  # names of no model, even if one could be found, and of a target's own MTP layer as heads
NO_ADDRESS = "none"  # where a verifier listens that only dials out
VOCABULARIES = ("same", "shared", "text")
DTYPES = ("auto", "float32", "bfloat16", "float16")


# --- options of several sections ------------------------------------------------------------------------------------


def _broker() -> str:
    return option(DEFAULT_BROKER, "Address of the broker. Several: separated by commas.", check=check_brokers)


def _keys() -> str:
    return option("", "Directory of CURVE keys (`specq keys`), or DIRECTORY/NAME for one key. Default: no encryption.")


def _insecure() -> bool:
    return option(default=False, text="Allow listening on non-local addresses without keys.")


def _drain() -> float:
    return option(5.0, "Time after SIGTERM for running jobs to finish or move, in seconds.", high=86_400)


def _name() -> str:
    return option("", "Name in logs and statistics. Default: the role and the process id.")


def _progress() -> bool:
    return option(default=False, text="Print progress while the worker loads and measures.")


def _model() -> str:
    return option(
        "",
        "Model: a name from `specq models`, a Hugging Face directory, a GGUF file, or a hub name. Default: smollm2.",
    )


def _vocabulary() -> str:
    return option(
        "same",
        "How to use a draft model with a different tokenizer. `same`: refuse it. `shared`: draft only tokens that "
        "both vocabularies have. `text`: decode drafts to text, then encode the text for the target.",
        choices=VOCABULARIES,
    )


def _device() -> str:
    return option("auto", "Device to compute on: cpu, cuda, cuda:1 or mps. `auto`: a GPU if present.")


def _dtype() -> str:
    return option(
        "auto", "Number format of the weights. `auto`: float32 on a CPU, else the checkpoint's.", choices=DTYPES
    )


def _kv_slots() -> int:
    return option(0, "Capacity of the KV cache, in tokens. 0: the engine chooses.")


def _engine_options() -> Options:
    return option((), "Further engine option, as name=value. For vLLM: an argument of EngineArgs. Repeatable.")


def _cores() -> Cores:
    return option((), "CPU cores to pin to, e.g. 0,2-3. Default: not pinned.")


def _threads() -> int:
    return option(0, "Number of compute threads. 0: one per pinned core, or the library's default.", high=4096)


def _check_slowdown(key: str, value: float) -> None:
    if 0 < value < 1:
        raise ConfigError(f"{key} is {value:g}; give at least 1, as in 1.8, or 0 for no limit")


@dataclass(frozen=True, slots=True)
class BrokerConfig(Section):
    """The broker."""

    bind: str = option(DEFAULT_BROKER, "Address to listen on.")
    advertise: str = option("", "Address where other machines reach this broker. Default: from `bind`.")
    heartbeat_ms: int = option(500, "Interval between worker heartbeats, in ms.", low=10, high=60_000)
    liveness_ms: int = option(
        3000, "Declare a worker dead after this long without a heartbeat, in ms.", low=20, high=600_000
    )
    max_jobs: int = option(10_000, "Maximum number of jobs that wait or run at the same time.", low=1)
    drafters_per_job: int = option(2, "Maximum number of draft workers per job, each with a different model.", high=8)
    journal: str = option(
        "",
        "Journal file, or postgresql:// for several brokers. `none`: keep jobs in memory only. Default: one file per "
        "broker address, in SPECQ_STATE.",
    )
    durability: str = option(
        "full",
        "What accepted jobs survive. `full`: a power failure. `process`: only the end of the process.",
        choices=DURABILITIES,
    )
    keep_hours: float = option(168.0, "How long to keep results, in hours.", low=0.0, high=1e6)
    keep_mb: int = option(
        1024,
        "Maximum size of the journal, in MB. When full, delete the oldest results, then refuse new jobs.",
        high=2**40,
    )
    traced_jobs: int = option(
        2, "Number of jobs at a time to trace in all processes without a request (`specq trace`).", high=1024
    )
    weights_wait_seconds: float = option(
        600.0,
        "Fail a job after this long without a verifier that has its model's weights, in seconds. 0: never.",
        high=1e9,
    )
    take_over: bool = option(
        default=False, text="Take over the journal of a broker that hangs. The old broker exits when it resumes."
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
                f"broker.liveness_ms is {self.liveness_ms}, but must be at least twice heartbeat_ms "
                f"({self.heartbeat_ms})"
            )


@dataclass(frozen=True, slots=True)
class TargetConfig(Section):
    """A target verifier."""

    broker: str = _broker()
    model: str = _model()
    engine: str = option(
        "auto", "Engine that runs the model. `auto`: native for GGUF files on a CPU, torch for all others."
    )
    name: str = _name()
    progress: bool = _progress()
    bind: str = option("tcp://127.0.0.1:*", "Address to listen on. Port *: any free one. `none`: only dial the broker.")
    advertise: str = option("", "Address where the broker connects to this verifier. Default: the bound address.")
    device: str = _device()
    dtype: str = _dtype()
    threads: int = _threads()
    cores: Cores = _cores()
    kv_slots: int = _kv_slots()
    engine_options: Options = _engine_options()
    own: Tables = hidden()
    max_sessions: int = option(64, "Maximum number of sessions in flight.", low=1, high=65_536)
    max_step_rows: int = option(512, "Maximum rows (tokens and draft nodes) in one forward pass.", low=1, high=65_536)
    max_prefill_slowdown: float = option(
        1.8,
        "Maximum slowdown of a decode step by prefill rows, as a factor of at least 1. 0: no limit.",
        high=1e6,
        check=_check_slowdown,
    )
    max_prefill_rows: int = option(
        0,
        "Maximum rows of a forward pass with prefill, if larger than max_step_rows. 0: the engine chooses.",
        high=65_536,
    )
    trust_drafts: bool = option(
        default=True,
        text="Use the draft distributions sent by drafters. If off, each draft token counts as deterministic.",
    )
    prompt_lookup: str = option(
        "suffix",
        "Draft from earlier text: `suffix` (suffix decoding) or `none`.",
        choices=("suffix", "none"),
    )
    shared_tokens: int = option(
        0,
        "Tokens of finished jobs to keep, in total, for drafting later jobs of the same key. 0: keep none.",
        high=10**9,
    )
    lookahead: bool = option(
        default=False,
        text="Also draft n-grams that the target produces in spare rows of its steps (lookahead decoding).",
    )
    lookahead_window: int = option(
        15, "Maximum lookahead window width W. Reduced when extra rows would slow the step.", low=1, high=256
    )
    lookahead_ngram: int = option(
        5, "Lookahead n-gram length N, in tokens. Each window column adds N-1 rows to a step.", low=2, high=32
    )
    lookahead_guesses: int = option(
        0, "Maximum number of lookahead n-grams G to draft per step. 0: the window width.", high=256
    )
    drafts: str = option(
        "measured",
        "When to use drafts. `measured`: when they raise tokens per second. `always`: in every step.",
        choices=("measured", "always"),
    )
    draft_model: str = option("", "Draft model to run in this process, on the same device. Default: none.")
    vocabulary: str = _vocabulary()
    heads: str = option(
        "",
        "Medusa heads, an EAGLE-3 head or a block drafter for this process: a directory or a name from `specq models`. "
        "`mtp`: the target's own MTP layer, which `specq up` uses by default, but not with vllm. `none`: no heads.",
    )
    heads_tree: str = option(
        "",
        "Tree for the heads to draft, as paths of ranks or a file of them. Default: best first by probability.",
    )
    fan_out: int = option(3, "Children per tree level that this process drafts, with few sessions.", low=1, high=8)
    chain: int = option(8, "Maximum tree levels that this process drafts per step.", low=1, high=32)
    drain_seconds: float = _drain()
    verbose: bool = option(default=False, text="Log each draft node with its verdict, and all debug events.")
    keys: str = _keys()
    insecure: bool = _insecure()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.bind != NO_ADDRESS:
            _check_bind(self)
        elif self.advertise:
            raise ConfigError("target.advertise is set, but target.bind has the value none; set only one of them")
        if self.advertise:
            check_connect("target.advertise", self.advertise)
        elif self.bind != NO_ADDRESS and read_address("target.bind", self.bind).is_wildcard:
            raise ConfigError(f"target.bind is {self.bind}, which is not one address; set target.advertise")
        if self.heads_tree and not self.heads:
            raise ConfigError("target.heads_tree needs target.heads; set target.heads to the heads of this tree")


@dataclass(frozen=True, slots=True)
class DraftConfig(Section):
    """A draft worker."""

    broker: str = _broker()
    model: str = _model()
    proposer: str = option("draft-model", "Proposer that makes the drafts.")
    heads: str = option(
        "", "Directory of Medusa heads for the draft model: same drafts in fewer passes. Default: none."
    )
    vocabulary: str = _vocabulary()
    target: str = option(
        "",
        "Target model, named as in `model`. Needed for its tokenizer (vocabulary shared or text) and for its sizes and "
        "embedding (proposers eagle3 and block). Default: unknown.",
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
    width: int = option(
        8, "Maximum nodes to expand in one pass. With chains: two, or one per session.", low=1, high=1024
    )
    fan_out: int = option(3, "Children per expanded node.", low=1, high=64)
    max_ahead: int = option(32, "Maximum number of tokens to draft ahead of the committed text.", low=1, high=1024)
    chain: int = option(6, "Tree levels to draft in one call, on a GPU.", low=1, high=32)
    distribution_size: int = option(
        32, "Tokens per draft distribution to send with each draft, for strategy probabilistic.", low=1, high=1024
    )
    nice: int = option(19, "Value to add to the niceness of the ready process. 19: run only on idle cores.", high=19)


@dataclass(frozen=True, slots=True)
class UpConfig(Section):
    """The processes that `specq up` starts."""

    targets: int = option(1, "Number of verifiers to start.", low=1, high=256)
    drafters: int = option(
        AUTO_DRAFTERS,
        "Number of draft workers to start. -1: choose automatically for this machine.",
        low=AUTO_DRAFTERS,
        high=1024,
    )
    serve: bool = option(default=False, text="Also start the OpenAI-compatible HTTP gateway (section `serve`).")


@dataclass(frozen=True, slots=True)
class ClientConfig(Section):
    """A client."""

    broker: str = _broker()
    keys: str = _keys()
    timeout_s: float = option(10.0, "Time to wait for a reply of the broker, in seconds.", low=0.001, high=86_400)


@dataclass(frozen=True, slots=True)
class ServeConfig(Section):
    """The gateway: OpenAI's HTTP API in front of a broker."""

    broker: str = _broker()
    keys: str = _keys()
    bind: str = option("tcp://127.0.0.1:8000", "Address to listen on for HTTP.")
    api_keys: str = option("", "File of API keys (`specq keys api`). Default: no authentication.")
    tls_cert: str = option("", "TLS certificate file, in PEM format. Default: no TLS.")
    tls_key: str = option("", "Private key file of the TLS certificate, in PEM format. Required with `tls_cert`.")
    hosts: str = option("", "Allowed Host header values, separated by commas. Default: only localhost and addresses.")
    cors_origins: Texts = option(
        Texts(()),
        "Origin (https://chat.example.org) whose web pages may send requests; * allows all. Repeatable. Default: only "
        "the gateway's own page.",
        check=check_origins,
    )
    insecure: bool = option(default=False, text="Allow listening on non-local addresses without API keys or TLS.")
    timeout_s: float = option(
        10.0, "Fail a request after this long without a reply of the broker, in seconds.", low=0.001, high=86_400
    )
    total_seconds: float = option(3600.0, "Maximum total time of a request, in seconds.", low=0.001, high=86_400)
    idle_seconds: float = option(
        60.0, "Close a connection after this long without a request, in seconds.", low=1, high=86_400
    )
    header_seconds: float = option(10.0, "Maximum time to receive the headers, in seconds.", low=0.001, high=86_400)
    body_seconds: float = option(30.0, "Maximum time to receive the body, in seconds.", low=0.001, high=86_400)
    body_kb: int = option(1024, "Maximum size of a request body, in KB.", low=1, high=1_048_576)
    header_kb: int = option(32, "Maximum size of the request headers, in KB.", low=1, high=1024)
    connections: int = option(4096, "Maximum number of open connections.", low=1, high=65_536)
    batches: str = option(
        "",
        "File for uploads and batches, or postgresql:// for several gateways. `none`: no batches. Default: one file "
        "per broker address, in SPECQ_STATE.",
    )
    batch_store_mb: int = option(2048, "Maximum size of all files together, in MB.", low=1, high=2**40)
    batch_days: float = option(30.0, "How long to keep files and batches, in days.", low=0.001, high=36_500)
    upload_mb: int = option(200, "Maximum size of an uploaded file, in MB.", low=1, high=2**30)
    requests_per_key: int = option(
        1024, "Maximum concurrent requests per API key, or of all clients without keys.", low=1
    )
    drain_seconds: float = _drain()
    cores: Cores = _cores()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        _check_http(self)


def _check_http(section: ServeConfig) -> None:
    """Raise ConfigError for a non-HTTP address, or a non-local address without API keys and TLS."""
    bind = read_address("serve.bind", section.bind)
    if not bind.is_tcp:
        raise ConfigError(f"serve.bind is {section.bind}; expected tcp://HOST:PORT")
    if bool(section.tls_cert) != bool(section.tls_key):
        raise ConfigError("serve.tls_cert and serve.tls_key must be set together; give both or neither")
    missing = [name for name in ("api_keys", "tls_cert") if not getattr(section, name)]
    if missing and not section.insecure and not bind.is_local:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(
            f"serve.bind is {section.bind}, which other machines can reach: give {flags} (docs/http-api.md), bind "
            f"127.0.0.1, or allow it: --insecure for specq serve, or `insecure = true` under [serve] in a --config "
            f"file for specq up"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """All sections of one configuration file."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    up: UpConfig = field(default_factory=UpConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    ray: RayConfig = field(default_factory=RayConfig)


SECTIONS: dict[str, type[Section]] = kinds(Config)


def _check_bind(section: BrokerConfig | TargetConfig) -> None:
    """Raise ConfigError unless the section is allowed to listen on its address."""
    key = f"{section_name(type(section))}.bind"
    check_bind(key, section.bind, insecure=section.insecure or bool(section.keys))

"""Messages to a worker, from the broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from specq.protocol import bounds
from specq.protocol.activations import BF16
from specq.protocol.messages.base import (
    Addresses,
    Capabilities,
    ClockUs,
    Count,
    Id,
    Lane,
    Message,
    Name,
    TapForm,
    TapLayers,
    TapWindow,
    Tokens32,
    WithReason,
)
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.versions import since


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Welcome(Message):
    """The worker is registered. It must send a `Heartbeat` at least this often.

    - capabilities: of the broker, for a worker whose `Hello` lists its own.
    """

    TYPE: ClassVar[str] = "welcome"
    heartbeat_ms: Annotated[int, bounds.HEARTBEAT_MS]
    capabilities: Capabilities = since(6, ())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Brokers(Message):
    """The brokers that serve this one's journal, by address. A worker registers with each of them.

    Sent after `Welcome` and after a change, to workers with the capability "brokers". `own`: the sender's address.
    """

    TYPE: ClassVar[str] = "brokers"
    addresses: Addresses = ()
    own: Annotated[str, bounds.ENDPOINT] = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refused(WithReason):
    """The broker cannot use the worker, for the given reason. `fatal`: a new attempt is useless."""

    TYPE: ClassVar[str] = "refused"
    fatal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clock(Message):
    """The broker's monotonic clock when it received a `GetClock`. Also to a client. `echo_us`: its `sent_us`."""

    TYPE: ClassVar[str] = "clock"
    echo_us: ClockUs
    clock_us: ClockUs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Open(Message):
    """To a verifier: continue this context. `tokens_left` of max_tokens remain. Penalties need `prompt_len`.

    - trace: as in `Submit`.
    - explain: the session's verdicts must describe their verified nodes.
    - owner: the group that may share KV of prefixes and earlier texts. A peer that may see one text of an owner
      may see all.
    - by_owner: the broker relies on that, and reads `Verdict.cached_tokens`. Set for verifiers with the capability
      "owners".
    - former_ends: the text began under the model's `former_fingerprint`, so its `added_eos_ids` do not end the text.
    - is_background: it yields to other sessions. Set for verifiers with the capability "background".
    """

    TYPE: ClassVar[str] = "open"
    session_id: Id
    epoch: Id
    prompt_len: Count
    tokens_left: Count
    params: SamplingParams
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    trace: bool = False
    explain: bool = False
    owner: Name = ""
    former_ends: bool = since(6, False)
    by_owner: bool = since(6, False)
    is_background: bool = since(6, False)
    token_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Close(Message):
    """To a verifier: forget the session."""

    TYPE: ClassVar[str] = "close"
    session_id: Id
    epoch: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ack(Message):
    """To a verifier: the journal holds `length` tokens. With `resend`, send all later ones again."""

    TYPE: ClassVar[str] = "ack"
    session_id: Id
    epoch: Id
    length: Count
    resend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GetActivations(Message):
    """To a verifier: send the drafter of this lane hidden states of the session's text, as `Activations`.

    The verifier sends the latest kept rows, and new rows from now on. Without layers, it stops.

    - tap_layers: as in `specq.protocol.step_output.Tap`.
    - tap_form: the wire form, see `specq.protocol.activations`.
    - tap_window: number of latest rows to send of prompts and of what was computed before.
    """

    TYPE: ClassVar[str] = "get_activations"
    session_id: Id
    epoch: Id
    lane: Lane
    tap_layers: TapLayers = ()
    tap_form: TapForm = BF16
    tap_window: TapWindow = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assign(Message):
    """To a drafter: draft for this session in this lane.

    - trace: as in `Submit`.
    - owner: as in `Open`, for drafters with the capability "owners".
    """

    TYPE: ClassVar[str] = "assign"
    session_id: Id
    epoch: Id
    lane: Lane
    prompt_len: Count
    params: SamplingParams
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    trace: bool = False
    owner: Name = since(6, "")
    token_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release(Message):
    """To a drafter: stop drafting for the session."""

    TYPE: ClassVar[str] = "release"
    session_id: Id
    epoch: Id

"""The recommended command for this machine, and the reason, in plain sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specq.doctor.prediction import NAMES, PLAIN, WORKER, Prediction
from specq.protocol import BLOCK, EAGLE, LOOKAHEAD, SUFFIX
from specq.protocol import MEDUSA as HEADS

PAYS = 1.25  # times plain decoding; a smaller gain is within the error of a prediction
LARGE_BYTES = 8e9  # weights from which a CPU is slow
MANY = 16  # sessions
OF_HEADS = (HEADS, EAGLE, BLOCK)
TORCH = ("auto", "torch")  # the engine on a GPU


@dataclass(frozen=True, slots=True)
class Situation:
    """The input of the advice.

    It has the options of `specq up` for models and heads, and the size of the target's weights. It also has the
    machine, the engine, specq's processes that run there already, and whether the target has an MTP layer that drafts.
    """

    models: str
    has_draft: bool
    num_bytes: int
    num_cores: int
    has_gpu: bool
    has_vllm: bool
    engine: str = "auto"
    heads: str = ""
    runs_here: str = ""
    drafts_itself: bool = False


def advise(
    at: Situation, predictions: Sequence[Prediction], disturbed: str = "", *, is_hindered: bool = False
) -> list[str]:
    """Return the advice, the command line first.

    disturbed    the cause of a disturbed measurement, or "". With a cause no way of drafting is recommended.
    is_hindered  whether an error keeps specq from starting.
    """
    if is_hindered:
        said = [f"Fix the problems above, then start it: {command(at, '')}"]
    elif predictions and disturbed:
        said = [_undecided(at, disturbed)]
    else:
        said = list(_by_load(at, predictions)) if predictions else [f"Start it: {command(at, '')}"]
    if at.runs_here:
        said.append(
            f"specq is already running here ({at.runs_here}; see specq status). A second one would "
            f"share the processors with it."
        )
    said += _by_machine(at, max((one.num_sessions for one in predictions), default=1))
    return said


def _undecided(at: Situation, disturbed: str) -> str:
    why = f"The best drafting method is unknown, since the machine was not idle: {disturbed}"
    return f"{why}. Run this again when it is idle. Until then: {command(at, '')}, which measures in service"


def command(at: Situation, method: str) -> str:
    """Return the command that serves with a method; "" means with all methods."""
    further = {WORKER: " --drafters 1", LOOKAHEAD: " --config FILE"}.get(method, "")
    if method in (PLAIN, SUFFIX, *OF_HEADS) and at.has_draft:
        further = " --drafters 0"
    heads = at.heads if method in ("", *OF_HEADS) else ""
    return f"specq up --serve{at.models}{heads}{further}"


def _by_load(at: Situation, predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield, for each best method, the number of sessions from which it wins, in order."""
    before = None
    for num_sessions in sorted({one.num_sessions for one in predictions}):
        best = max((one for one in predictions if one.num_sessions == num_sessions), key=lambda one: one.ratio)
        method = best.method if best.ratio >= PAYS else PLAIN
        if method != before:
            yield _sentence(at, method, best)
        before = method


def _sentence(at: Situation, method: str, best: Prediction) -> str:
    sessions = f"{best.num_sessions} session{'s' * (best.num_sessions > 1)} at a time"
    if method == PLAIN:
        return (
            f"For {sessions} no method is predicted to gain more than {PAYS - 1:.0%} over plain decoding. specq "
            f"measures that in service and switches off sources that do not pay: {command(at, method)}"
        )
    why = f"{NAMES[method]} is predicted to be fastest, {best.ratio:.1f} times plain decoding"
    also = ', with "lookahead = true" below [target] in FILE' if method == LOOKAHEAD else ""
    return f"For {sessions} {why}: {command(at, method)}{also}"


def _by_machine(at: Situation, most_sessions: int) -> Iterator[str]:
    if not at.has_draft and not at.drafts_itself:
        yield (
            "There is no draft model, so drafts come only from repeated text. A model of a tenth of the target's size "
            "with the same tokenizer usually gains most: use --draft-model, or train one (specq train draft all "
            "--target MODEL)."
        )
    if at.num_bytes > LARGE_BYTES and not at.has_gpu:
        yield (
            "The target is large for a CPU, where each step reads all weights. A GGUF file of Q4_1 or Q8_0 reads fewer "
            "bytes. Drafts gain more when a step takes longer."
        )
    if at.has_gpu and at.engine in TORCH:
        how = "run specq doctor --engine vllm" if at.has_vllm else "install vllm and start from configs/vllm.toml"
        yield (f"This report is for the torch engine. For quantised models, and models that do not fit one GPU, {how}.")
    if not at.has_gpu and most_sessions >= MANY:
        yield (
            f"With {most_sessions} sessions on a CPU, extra rows slow a step, so drafts gain little. Use a GPU, or "
            f"more machines with a verifier each."
        )
    if at.num_cores == 1:
        yield (
            "There is one core for all processes: draft only in the verifier's own process (--drafters 0 or "
            "nothing at all)."
        )

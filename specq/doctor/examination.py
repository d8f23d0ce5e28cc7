"""The whole examination: the machine, the pair, and, if both are sound, measurements and predictions.

An examination as text. Measured and computed figures are in separate tables, and each names its kind."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from specq.config import MTP, NO_MODEL, Config, TargetConfig, options_of
from specq.doctor import engines, installation, pair
from specq.doctor.advice import Situation, advise
from specq.doctor.checks import NOTE, OK, WRONG, Check, is_sound
from specq.doctor.neighbours import load_average, running, usage, used_by_others
from specq.doctor.prediction import NAMES, Prediction, predict, significant
from specq.engines import ENGINES, INVARIANT
from specq.engines.native import AUTO
from specq.engines.vllm.versions import installed_version
from specq.models import HEADS, find_model
from specq.processes.deployment import drafted_by, placed
from specq.protocol import SpecqError
from specq.runtime import Tell, available_cores, available_memory, columns
from specq.runtime.machine import describe, gpu_free_bytes, gpus

if TYPE_CHECKING:
    from specq.doctor.measuring import MeasuredPair

# Largest ratio of the runs' step times to the earlier ones, or the reverse. Beyond it, drafts and steps ran under
# different conditions.
BUSY = 1.5
MOST_USED = 0.2  # of the processors, by other processes: beyond that the machine is busy
COLUMNS = ("method", "num_sessions", "tokens_per_second", "ratio", "depth")


@dataclass(frozen=True, slots=True)
class Question:
    """The request: the models of a configuration, as for `specq up`, and numbers of sessions.

    is_quick  whether to skip the measurements.
    """

    config: Config
    sessions: tuple[int, ...]
    is_quick: bool = False


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings; `measured` is None without a measurement."""

    checks: tuple[Check, ...]
    measured: MeasuredPair | None
    predictions: tuple[Prediction, ...]
    advice: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        return is_sound(self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return all findings as JSON-able values."""
        return {
            "about": describe("specq doctor"),
            "checks": [asdict(check) for check in self.checks],
            "measured": self.measured and measured_figures(self.measured),
            "predicted": [{name: _rounded(getattr(one, name)) for name in COLUMNS} for one in self.predictions],
            "advice": list(self.advice),
        }


def _rounded(value: str | float) -> str | float:
    return significant(value) if isinstance(value, float) else value


def measured_figures(measured: MeasuredPair) -> dict[str, Any]:
    """Return the measured figures by name."""
    plain = measured.runs[0]
    runs = [
        {
            "method": run.method,
            "num_sessions": run.num_sessions,
            "rounds": len(run.rounds.rounds),
            "tokens_per_round": significant(run.num_tokens / max(len(run.rounds.rounds), 1)),
            "nodes_per_round": significant(run.rounds.nodes(run.rounds.deepest)),
            "accepted_by_depth": [significant(prob) for prob in run.rounds.accept_probs()],
            "ms_per_step": significant(1e3 * run.seconds / max(run.num_steps, 1)),
            "tokens_per_second": significant(run.num_tokens / run.seconds) if run.seconds else 0.0,
            "is_same_text": run.agrees_with(plain),
        }
        for run in measured.runs
    ]
    return {"kernels": measured.device, **measured.figures(), "runs": runs}


def examine(question: Question, tell: Tell) -> Examination:
    """Run all checks; raise ConfigError for a named model that is missing."""
    config = _with_models(question.config)
    checks = list(installation.look(config))
    memory = available_memory()
    gpu_bytes = _gpu_bytes() * engines.num_devices(config)
    arithmetic = str(options_of(config.target).get("arithmetic", AUTO))
    heads = "" if config.target.heads == MTP else config.target.heads  # the engine's own
    found = pair.look(config.target.model, config.draft.model, memory, gpu_bytes, heads, arithmetic)
    drafts_itself = config.target.heads not in ("", question.config.target.heads)
    if drafts_itself and not _are_heads_right(found):
        drafts_itself, config = False, replace(config, target=replace(config.target, heads="", heads_tree=""))
        found = replace(found, checks=tuple(_as_note(check) for check in found.checks))
    target = found.target.path if found.target else None
    if not question.config.draft.model and (reason := drafted_by(question.config).reason):
        checks.append(Check("draft choice", OK, reason))
    asked = replace(config, target=replace(config.target, heads=question.config.target.heads))
    checks += [*found.checks, *engines.look(asked, target, describe("specq doctor")["versions"], len(gpus()))]
    measured, predictions, disturbed = None, list[Prediction](), ""
    cores, here = available_cores(), running()
    before, load = usage(cores), load_average()
    if not question.is_quick and found.target and not _hinders(checks):
        measured = _attempt(lambda: _measured(config, found, question.sessions, tell), checks, config.target.engine)
    if measured is not None:
        used = used_by_others(before, usage(cores), len(cores), load)
        calm = quiet(measured.figures()["steps_took_times_the_curve"], used, len(cores), here)
        checks += [_same_text(measured), calm]
        disturbed = calm.found if calm.status == NOTE else ""
        predictions = predict(measured.methods, measured.costs, question.sessions)
    situation = replace(_situation(question.config, found, here), drafts_itself=drafts_itself)
    said = advise(situation, predictions, disturbed, is_hindered=_hinders(checks)) if found.target else []
    return Examination(tuple(checks), measured, tuple(predictions), tuple(said))


def _gpu_bytes() -> int:
    """Return the free memory of the GPU that computes; 0 if the CPU computes."""
    return gpu_free_bytes() if installation.has_cuda(describe("specq doctor")["versions"]) else 0


def _with_models(config: Config) -> Config:
    """Return the configuration with the models that `specq up` would use.

    Raises ConfigError for a named model that is missing.
    """
    for name, role in ((config.target.model, "target"), (config.draft.model, "draft"), (config.target.heads, HEADS)):
        if name and (role == "target" or name not in (NO_MODEL, MTP)):
            find_model(name, role)
    chosen = placed(config)
    return replace(
        config,
        target=replace(config.target, model=chosen.target.model, heads=chosen.target.heads),
        draft=replace(config.draft, model="" if config.draft.model == NO_MODEL else chosen.draft.model),
    )


def _are_heads_right(found: pair.ModelPair) -> bool:
    return all(check.name != pair.HEADS_CHECK or check.status != WRONG for check in found.checks)


def _as_note(check: Check) -> Check:
    """Return a check of heads that are only the default: the target is served without them."""
    if check.name != pair.HEADS_CHECK:
        return check
    return replace(check, status=NOTE, advice="the target's own MTP layer; specq up serves without it")


def _hinders(checks: Sequence[Check]) -> bool:
    """Return whether an error prevents the measurement; the portable path is slow, but it works."""
    return any(check.status == WRONG and check.name not in ("kernels", "broker", "state") for check in checks)


def _measured(config: Config, found: pair.ModelPair, sessions: Sequence[int], tell: Tell) -> MeasuredPair:
    from specq.doctor.measuring import measure  # imports torch

    assert found.target is not None, "no measurements without a target"
    model, draft = str(found.target.path), str(found.draft.path) if found.draft else ""
    own = draft if ENGINES.resolve(config.target.engine).colocates else ""
    target = replace(config.target, model=model, draft_model=own)
    asked = replace(config, target=target, draft=replace(config.draft, model=draft))
    return measure(asked, max(sessions), tell, found.draft.num_places if found.draft else 1)


def _attempt(measure: Callable[[], MeasuredPair], checks: list[Check], engine: str) -> MeasuredPair | None:
    """Measure; an exception becomes an error of the pair."""
    try:
        return measure()
    except SpecqError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - libraries raise many kinds for files that are cut short
        reason = f"{type(error).__name__}: {error}"
    other = f"{engines.VLLM}, which supports more models" if engine != engines.VLLM else TargetConfig().engine
    advice = f"fetch the model again, choose another, or try another engine: --engine {other}"
    checks.append(Check("loading", WRONG, reason, advice))
    return None


def quiet(factor: float, used: float | None, num_cores: int, here: str = "") -> Check:
    """Check that the measurement was not disturbed.

    factor  the time of the runs' steps divided by that of the earlier ones. Below 1, the earlier ones were disturbed.
    used    processors that other processes used; None: unknown.
    here    the processes of specq on this machine.

    The check is OK if the factor is near 1 and other processes used few processors.
    """
    found = f"steps took {factor:.1f} times as long in the runs as alone before"
    if used is not None:
        found += f", other processes used {used:.1f} of {num_cores} processor{'s' * (num_cores != 1)}"
    if here:
        found += f", and specq is already running here ({here})"
    if 1 / BUSY < factor < BUSY and (used is None or used <= MOST_USED * num_cores):
        return Check("quiet", OK, found)
    stop = "stop the specq that is running here, and run this" if here else "run it"
    return Check(
        "quiet", NOTE, found, f"the machine is busy: {stop} again when it is idle; the predictions are unreliable"
    )


def _same_text(measured: MeasuredPair) -> Check:
    """Check that drafts do not change the text.

    If rounding depends on the batch, as on a GPU without `batch_invariant`, near ties may change it.
    """
    plain, *others = measured.runs
    is_promised = "cpu" in measured.device or measured.device.startswith(INVARIANT)
    differ = [run.method for run in others if not run.agrees_with(plain)]
    if not differ:
        found = f"of {len(plain.texts)} prompts plainly and with drafts, all equal"
        return Check("same text", OK, found + ("" if is_promised else "; not promised without batch_invariant"))
    found = f"drafts of {', '.join(differ)} changed a text"
    if is_promised:
        return Check("same text", WRONG, found, "that is a bug of specq; please report it with the output of --json")
    return Check(
        "same text",
        NOTE,
        found,
        "on a GPU, nearly equal logits may change order with the batch; batch_invariant = true "
        "rules that out (README, Limits)",
    )


def _situation(asked: Config, found: pair.ModelPair, here: str) -> Situation:
    engine = "" if asked.target.engine == TargetConfig().engine else asked.target.engine
    further = (("--engine-option", one) for one in asked.target.engine_options)
    named = (("--engine", engine), *further, ("--model", asked.target.model), ("--draft-model", asked.draft.model))
    return Situation(
        models="".join(f" {option} {shlex.quote(name)}" for option, name in named if name),
        has_draft=found.draft is not None,
        num_bytes=found.target.num_bytes if found.target else 0,
        num_cores=len(available_cores()),
        has_gpu=bool(gpus()),
        engine=asked.target.engine,
        has_vllm=bool(installed_version()),
        heads=f" --heads {asked.target.heads}" if asked.target.heads else "",
        runs_here=here,
    )


SHOWN_DEPTHS = 4
SHOWN_DIGITS = 2


def lines(examination: Examination) -> Iterator[str]:
    """Yield the parts of the answer."""
    yield columns([("CHECK", "", "FOUND"), *((one.name, one.status, one.found) for one in examination.checks)])
    todo = [(one.name, one.status, one.advice) for one in examination.checks if one.advice]
    if todo:
        yield "\n" + columns([("WHAT TO DO", "", ""), *todo])
    if examination.measured is not None:
        yield from _measured_lines(measured_figures(examination.measured))
    if examination.predictions:
        yield ("\nPREDICTED tokens/s, and the ratio to plain decoding: computed from the measurements above")
        if any(one.name == "quiet" and one.status == NOTE for one in examination.checks):
            yield "on a machine that was not idle, so these figures are unreliable"
        yield ""
        yield columns(_predicted(examination.predictions))
    if examination.advice:
        yield "\nADVICE"
        yield from (f"- {sentence}" for sentence in examination.advice)


def _measured_lines(figures: dict[str, Any]) -> Iterator[str]:
    steps = ", ".join(f"{rows}: {_shown(ms)}" for rows, ms in figures["step_ms_by_rows"].items())
    levels = ", ".join(f"{count}: {_shown(ms)}" for count, ms in figures["draft_level_ms_by_sessions"].items())
    yield "\nMEASURED here, in this process, without sockets: a few bundled prompts, greedy\n"
    yield columns(_runs(figures["runs"]))
    yield f"\na step of the target in ms, by its rows: {steps}"
    if levels:
        yield f"a level of the draft model in ms, by sessions: {levels}"
    if figures["draft_worker_pass_ms"]:
        yield f"a pass of a draft worker in ms: {_shown(figures['draft_worker_pass_ms'])}"


def _runs(runs: Sequence[dict[str, Any]]) -> list[tuple[object, ...]]:
    header = ("METHOD", "SESSIONS", "ROUNDS", "TOKENS/ROUND", "ACCEPTED BY DEPTH", "MS/STEP", "TOKENS/S", "SAME TEXT")
    rows = []
    for run in runs:
        depths = " ".join(f"{prob:.0%}" for prob in run["accepted_by_depth"][:SHOWN_DEPTHS])
        same = "yes" if run["is_same_text"] else "NO"
        tokens, step_ms, rate = (_shown(run[name]) for name in ("tokens_per_round", "ms_per_step", "tokens_per_second"))
        figures = (run["rounds"], tokens, depths or "-", step_ms, rate)
        rows.append((NAMES[run["method"]], run["num_sessions"], *figures, same))
    return [header, *rows]


def _predicted(predictions: Sequence[Prediction]) -> list[tuple[object, ...]]:
    """Return a row for each method, two columns for each number of sessions."""
    counts = list(dict.fromkeys(one.num_sessions for one in predictions))
    methods = list(dict.fromkeys(one.method for one in predictions))
    found = {(one.method, one.num_sessions): one for one in predictions}
    header = ["METHOD", *(f"{count} SESSION{'S' * (count > 1)}" for count in counts)]
    rows = [[NAMES[method], *(_cell(found.get((method, count))) for count in counts)] for method in methods]
    return [tuple(row) for row in (header, *rows)]


def _cell(one: Prediction | None) -> str:
    return "-" if one is None else f"{_shown(one.tokens_per_second)} ({one.ratio:.1f})"


def _shown(value: float) -> str:
    """Return a figure with its significant digits."""
    found = significant(value, SHOWN_DIGITS)
    return f"{found:.0f}" if found >= 10 else f"{found:g}"

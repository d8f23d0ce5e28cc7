"""An examination as text. Measured and computed figures are in separate tables, and each names its kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specq.doctor.checks import NOTE
from specq.doctor.examination import Examination, measured_figures
from specq.doctor.prediction import NAMES, Prediction, significant
from specq.runtime import columns

SHOWN_DEPTHS = 4
SHOWN_DIGITS = 2


def lines(examination: Examination) -> Iterator[str]:
    """Yield the parts of the answer."""
    yield columns([("CHECK", "", "FOUND"), *((one.name, one.status, one.found) for one in examination.checks)])
    todo = [(one.name, one.status, one.advice) for one in examination.checks if one.advice]
    if todo:
        yield "\n" + columns([("WHAT TO DO", "", ""), *todo])
    if examination.measured is not None:
        yield from _measured(measured_figures(examination.measured))
    if examination.predictions:
        yield ("\nPREDICTED tokens/s, and the ratio to plain decoding: computed from the measurements above")
        if any(one.name == "quiet" and one.status == NOTE for one in examination.checks):
            yield "on a machine that was not idle, so these figures are unreliable"
        yield ""
        yield columns(_predicted(examination.predictions))
    if examination.advice:
        yield "\nADVICE"
        yield from (f"- {sentence}" for sentence in examination.advice)


def _measured(figures: dict[str, Any]) -> Iterator[str]:
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

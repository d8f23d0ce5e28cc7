"""Two reports of a broker as rates and rows of text."""

from __future__ import annotations

from specq.observe.report import Snapshot, unused_sources
from specq.observe.sections import NOT_USED, SECTIONS, View, drafters, plain, sections, sessions, short, workers
from specq.protocol import COLOCATED, REMOTE, SUFFIX
from specq.verifier.control.choices import Choice, DraftDecision
from tests.each import each

WIDE_ID = 2**63 - 1


def worker(name: str = "v", role: str = "target", **values: object) -> dict[str, object]:
    report = {"name": name, "role": role, "model": "m" * 40, "engine": "torch", "state": "ready", "jobs": 3}
    return report | {"steps": 0, "tokens": 0, "drafts": 0, "free_slots": 65_536, "heard_s_ago": 0.25} | values


def session(job: int = 1, **values: object) -> dict[str, object]:
    report = {"job": job, "label": "1", "bucket": "", "state": "running", "verifier": "v", "drafters": 2, "prompt": 4}
    counts = {"tokens": 10, "max_tokens": 128, "age_s": 3.0, "rounds": 4, "draft_tokens": 8, "accepted_tokens": 6}
    return report | counts | values


def report(time_s: float = 10.0, workers: tuple[object, ...] = (), listed: tuple[object, ...] = (), **more: object):
    counts = {"jobs": {"waiting": 0, "running": 1, "finished": 2}, "counts": {"jobs": 3, "undelivered": 0}}
    sessions = {"num": len(listed), "busiest": list(listed)}
    return {"time_s": time_s, "models": ["m"], "workers": list(workers), "sessions": sessions} | counts | more


def test_rates_are_by_the_brokers_clock():
    before = report(10.0, (worker(tokens=100, steps=10), worker("d", "draft", drafts=4)), (session(tokens=10),))
    now = report(12.0, (worker(tokens=300, steps=20), worker("d", "draft", drafts=10)), (session(tokens=50),))

    snapshot = Snapshot(now, before)

    assert [(one["tokens_s"], one["steps_s"], one["drafts_s"]) for one in snapshot.workers] == [(100, 5, 0), (0, 0, 3)]
    assert (snapshot.tokens_s, snapshot.sessions[0]["tokens_s"], snapshot.sessions[0]["acceptance"]) == (100, 20, 0.75)


def test_it_shows_who_drafts_for_whom():
    """With accepted tokens a second between two reports, else all of them; also for a verifier without jobs now."""

    def said(time_s: float, *accepted: int, **jobs: int):
        counts = dict(zip(("v", "w"), accepted, strict=False))
        return report(time_s, (worker("d", "draft", metrics={"accepted_for": counts}, drafts_for=jobs), worker("v")))

    first, then = said(10.0, 100, v=3), said(12.0, 300, 8, v=2, x=1)
    rows = [drafters(snapshot, View()).rows for snapshot in (Snapshot(first), Snapshot(then, first))]
    assert rows == [
        (("d", "v", 3, "100", "-"),),
        (("d", "v", 2, "200", "100"), ("d", "w", 0, "8", "4.0"), ("d", "x", 1, "0", "0.0")),
    ]
    assert "who drafts for whom" in plain(Snapshot(then, first), View())


def test_only_verifiers_have_free_kv():
    """A draft worker does not report it, so it is not 0."""
    shown = workers(Snapshot(report(10.0, (worker(), worker("d", "draft", free_slots=0)))), View())
    at = shown.header.index("FREE KV")
    assert [row[at] for row in shown.rows] == ["65.5k", "-"]


def test_bytes_of_one_report_are_since_the_worker_registered():
    """So `specq status` has them. Two reports have the rate between them, and an old broker reports none."""
    first, then = ({"sent_bytes": n, "received_bytes": 3 * n, "registered_s_ago": s} for n, s in ((100, 4), (500, 6)))
    before, now = report(10.0, (worker(**first),)), report(12.0, (worker(**then),))

    rates = [
        (one["sent_bytes_s"], one["received_bytes_s"])
        for snapshot in (Snapshot(before), Snapshot(now, before), Snapshot(report(workers=(worker(),))))
        for one in snapshot.workers
    ]

    assert rates == [(25, 75), (200, 600), (None, None)]
    assert "25.0     75.0" in plain(Snapshot(before), View())


def test_one_report_has_no_rates():
    """Nor has a worker or session that is new, nor a broker that was started again."""
    alone = Snapshot(report(10.0, (worker(tokens=5),), (session(),)))
    fresh = Snapshot(report(12.0, (worker("new"),), (session(2),)), report(10.0, (worker(),), (session(),)))
    restarted = Snapshot(report(1.0, (worker(),)), report(1000.0, (worker(),)))

    for snapshot in (alone, fresh, restarted):
        assert snapshot.tokens_s is None
        assert [one["tokens_s"] for one in (*snapshot.workers, *snapshot.sessions)] == [None] * (
            len(snapshot.workers) + len(snapshot.sessions)
        )


def test_a_worker_that_was_started_again_counts_anew():
    snapshot = Snapshot(report(11.0, (worker(tokens=7),)), report(10.0, (worker(tokens=1000),)))

    assert snapshot.tokens_s == 7


def test_workers_of_one_name_have_rates_of_their_own():
    """In any order: their incarnations differ. A worker restarted under its name has no rate at first."""
    first, second = ({"name": "v", "incarnation": number} for number in (7, 8))
    before = report(10.0, (worker(tokens=10, **first), worker(tokens=1000, **second)))
    now = report(12.0, (worker(tokens=1010, **second), worker(tokens=30, **first), worker("v", incarnation=9)))

    snapshot = Snapshot(now, before)

    assert [one["tokens_s"] for one in snapshot.workers] == [5, 10, None]
    assert snapshot.tokens_s == 15


def test_what_drafters_count_is_not_shown_as_verifiers_work():
    """Names of metrics are free; and verifiers of one name have a row each."""
    counted = {"step_us": {"forward": [300], "plan": [100]}, "judged": {"remote": [10, 5]}}
    verifiers = tuple(worker(metrics=counted, incarnation=number) for number in (1, 2))
    snapshot = Snapshot(report(workers=(*verifiers, worker("d", "draft", metrics=counted))))

    found = {one.title: one.rows for one in sections(snapshot, View())}

    assert found["step time by phase"] == (("v", "75%", "25%"),) * 2
    assert found["drafts by source"] == (("draft worker", "20", "10", "50%", ""),)


@each("metrics", [({"judged": 5}, {"judged": {"a": [1]}}), ({"judged": {"a": [1]}}, {"judged": 5})])
def test_a_worker_with_changing_reports_harms_no_other_metric(metrics):
    """Names are free, so a name may have labels in one report and be a number in another."""
    before, now = (report(at, (worker(metrics=one),)) for at, one in zip((10.0, 11.0), metrics, strict=True))
    assert sections(Snapshot(now, before), View())


def test_what_verifiers_count_is_shown_since_the_report_before():
    """The step's time by phase, nodes by source; a verifier that was started again begins anew."""
    first = {"step_us": {"forward": [100, 3], "plan": [100]}, "judged": {"remote": [10, 5]}, "drafts_dropped": 3}
    second = {"step_us": {"forward": [400, 6], "plan": [200, 1]}, "judged": {"remote": [30, 15], "lookup": [4, 4]}}
    both = (report(1.0, (worker(metrics=first),)), report(2.0, (worker(metrics=second),)))

    found = {one.title: one.rows for one in sections(Snapshot(both[1], both[0]), View())}
    anew = {one.title: one.rows for one in sections(Snapshot(both[0] | {"time_s": 3.0}, both[1]), View())}

    assert found["step time by phase"] == (("v", "75%", "25%"),)
    assert found["drafts by source"] == (
        ("lookup", "4", "4", "100%", ""),
        ("draft worker", "20", "10", "50%", ""),
    )
    assert anew["step time by phase"] == (("v", "50%", "50%"),)


@each(
    ("choices", "not_used"),
    [
        ({"suffix": [1, 9], "colocated+suffix": [0, 8], "none": [0, 7]}, {"draft model in the verifier"}),
        ({"suffix": [0, 9], "colocated+suffix": [1, 9]}, set()),
        ({"colocated": [0, 5], "colocated unread": [0, 5], "suffix": [0, 4], "none": [1, 9]}, None),
        ({}, set()),  # no load yet, or of a version before
        ({"something": [1], "": [0, 1]}, set()),  # of a version to come
    ],
)
def test_unprofitable_sources_are_named_and_silent_ones_skipped(choices, not_used):
    """Also where nothing of a source was verified since the report before. None: both."""
    sources = ["draft model in the verifier", "lookup"]
    counted = {"judged": {"suffix": [4, 2], "colocated": [9, 3], "medusa": [0, 0]}, "choices": choices}
    both = (report(at, (worker(metrics=counted),)) for at in (1.0, 2.0))
    first, second = both
    not_used = set(sources) if not_used is None else not_used
    for snapshot in (Snapshot(second), Snapshot(second, first)):
        (found,) = [one for one in sections(snapshot, View()) if one.title == "drafts by source"]
        assert [row[0] for row in found.rows] == sources
        assert {row[0] for row in found.rows if row[-1] == NOT_USED} == not_used
        assert plain(snapshot, View(), 80).count(NOT_USED) == len(not_used)


def test_a_source_is_in_use_if_one_of_the_verifiers_uses_it():
    metrics = [{"judged": {"suffix": [4, 2]}, "choices": {used: [1, 9]}} for used in ("suffix", "none")]
    shown = report(1.0, tuple(worker(metrics=one, incarnation=i) for i, one in enumerate(metrics)))
    assert unused_sources(shown) == set()
    assert unused_sources(report(1.0, (worker(metrics={"choices": {"none": [1, 9], "suffix": [0, 8]}}),))) == {"suffix"}


CHOICES = {"colocated": [1, 41.2], "none": [0, 28], "suffix": [0, 20]}


def in_use(width: int = 0, **metrics: object) -> list[str]:
    """Return the lines of a verifier, and of a drafter that says the same, in the section of what is in use."""
    workers = (worker(metrics=metrics), worker("d", "draft", metrics=metrics))
    lines = plain(Snapshot(report(workers=workers)), View(), width).split("drafting in use\n")[1:]
    return [line for part in lines for line in part.split("\n\n")[0].splitlines()[1:]]


@each(
    ("reason", "other", "said"),
    [
        ("probe_won", Choice(), " (in use since a trial was faster)"),
        (
            "probe_lost",
            Choice(frozenset({REMOTE, SUFFIX})),
            " (a trial of drafts from draft worker + lookup was slower)",
        ),
        ("probe", Choice(), " (it is in a trial)"),
        (
            "drafts_fell",
            Choice(frozenset({COLOCATED}), True),
            " (in use since drafts from draft model in the verifier, unread became slower)",
        ),
    ],
)
def test_what_a_verifier_uses_and_why_is_said_in_a_sentence(reason, other, said):
    """With present forecasts, also for an old decision. The first line has the name of the verifier; no line is cut."""
    decided = DraftDecision(9, 4, reason, Choice(frozenset({COLOCATED})), 30.0, other, 20.0).numbers()
    lines = in_use(80, choices=CHOICES, decided=decided)

    assert [line[:2] for line in lines] == ["v ", *["  "] * (len(lines) - 1)], "the name stands in the first line"
    assert " ".join(line[1:].strip() for line in lines) == (
        f"drafts from draft model in the verifier: 41.2 tokens/s expected, plain decoding 28.0{said}"
    )


@each("decided", [None, [], [1, 2], [0.5] * 6, {"a": 1}, "x"])
def test_without_a_decision_that_is_known_the_rest_is_said(decided):
    assert in_use(choices={"none": [1, 5]}, decided=decided) == ["v         plain decoding: 5.0 tokens/s expected"]


@each("choices", [{}, 5, [1], {"none": [0, 1]}, {"none": [1]}])
def test_a_verifier_that_does_not_say_what_it_uses_has_no_line(choices):
    assert in_use(choices=choices) == []


def test_any_choice_report_of_a_verifier_is_printed_short():
    text = in_use(
        80, choices={"\x1b[2J" * 20: [1, 1e308], "x" * 100: [0, -1e308]}, decided=[2**63 - 1, *[-(2**63)] * 5]
    )
    assert 0 < len(text) < 8
    assert all(line.isprintable() and len(line) <= 80 for line in text)


def test_sessions_are_sorted_and_filtered():
    listed = tuple(session(job, tokens=10 * job, label=f'"q{job}"', age_s=9.0 - job) for job in (1, 3, 2))
    snapshot = Snapshot(report(listed=listed))

    def jobs(**view: object) -> list[str]:
        return [row[0] for row in sessions(snapshot, View(**view)).rows]

    assert jobs(sort_by="TOKENS") == ["3", "2", "1"]
    assert jobs(sort_by="AGE") == ["1", "2", "3"]
    assert jobs(sort_by="AGE", reverse=True) == ["3", "2", "1"]
    assert jobs(filter_by="Q2") == ["2"]


def test_batches_are_those_of_the_labels():
    """Other labels, as of detached jobs, count for none."""

    def label(batch: str, line: int) -> str:
        return f'"batch_{batch * 24} {line}/3000 {"0" * 64}'[:60]

    waiting = {"state": "waiting", "verifier": ""}
    listed = [
        session(1, label=label("a", 7)),
        session(2, label=label("a", 12)),
        session(3, label=label("b", 1), **waiting),
    ]
    others = [session(4, label='"batch_x 1/2 3"'), session(5, label='"http 0"'), session(6, label="7")]
    snapshot = Snapshot(report(listed=(*listed, *others)))

    (found,) = [one for one in sections(snapshot, View()) if one.title == "batches"]
    assert found.rows == ((f"batch_{'a' * 24}", 2, 0, "12/3000"), (f"batch_{'b' * 24}", 0, 1, "1/3000"))
    assert not [one for one in sections(Snapshot(report(listed=tuple(others))), View()) if one.title == "batches"]


def test_it_is_said_that_there_are_more_sessions():
    shown = report(listed=(session(),)) | {"sessions": {"num": 4000, "busiest": [session()]}}

    assert sessions(Snapshot(shown), View()).note == "the busiest 1 of 4000"


@each("width", [60, 80, 120])
def test_plain_text_fits_its_width(width):
    """Columns are left out before lines are cut: at 80 characters nothing that is shown is cut but reasons."""
    workers = (worker("a-long-name-of-a-verifier"), worker("d" * 30, "draft", state="draining"))
    rows = tuple(session(WIDE_ID - i, verifier="target-1234567890", label='"a label"') for i in range(3))
    text = plain(Snapshot(report(workers=workers, listed=rows)), View(), width)

    assert max(map(len, text.splitlines())) <= width
    assert width < 80 or (str(WIDE_ID) in text and "75%" in text and "draining" in text)


def test_control_characters_from_outside_are_not_printed():
    fault = {"age_s": 90.0, "kind": "job_failed", "who": "1", "reason": "bad \x1b[31m", "count": 2}
    text = plain(
        Snapshot(report(workers=(worker("\x1b[2J"),), listed=(session(label="\x07"),), faults=[fault])), View()
    )

    assert all(line.isprintable() for line in text.splitlines())
    assert "job failed" in text


def test_a_report_of_an_old_broker_is_shown_as_far_as_it_goes():
    text = plain(Snapshot({"workers": [], "jobs": {"waiting": 1}}), View())

    assert "jobs: 1 waiting" in text
    assert "no workers" in text


def test_sections_without_rows_are_left_out():
    assert [one.title for one in sections(Snapshot(report()), View())] == []
    assert len(SECTIONS) == 8


@each(
    ("value", "shown"),
    [(0, "0"), (9_999, "9999"), (10_000, "10.0k"), (65_536, "65.5k"), (2.5e6, "2.5M"), (3e11, "300G")],
)
def test_counts_are_short(value, shown):
    assert short(value) == shown

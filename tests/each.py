"""Many rows in one case: each row that fails is reported with its values, and the others run all the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each row, as `pytest.mark.parametrize` does, but in one case.

    A row has its own `tmp_path` and `monkeypatch`; all other fixtures are shared. Where a row takes seconds, or needs
    a fixture of its own, take `pytest.mark.parametrize`.
    """
    found = [dict(zip(names, row, strict=True)) if isinstance(names, tuple) else {names: row} for row in rows]
    assert found, "no rows"

    def of(test: Test) -> Test:
        def run(*instance: Any, **fixtures: Any) -> None:
            wrong = []
            for number, values in enumerate(found):
                try:
                    _run_row(test, instance, fixtures, values, number)
                except (Exception, pytest.fail.Exception) as error:
                    if "from pytest-timeout" in str(error):
                        raise
                    error.add_note(f"row {number}: {values!r:.1000}")
                    wrong.append(error)
            if wrong:
                raise BaseExceptionGroup(f"{len(wrong)} of {len(found)} rows of {test.__name__}", wrong)

        own = inspect.signature(test).parameters
        run.__signature__ = inspect.Signature([own[name] for name in own if name not in found[0]])
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.__qualname__, run.pytestmark = test.__qualname__, list(getattr(test, "pytestmark", ()))
        if getattr(test, "is_hypothesis_test", False):
            run.pytestmark.append(pytest.mark.hypothesis)  # as its own plugin marks it
        return run

    return of


def _run_row(
    test: Test, instance: tuple[Any, ...], fixtures: dict[str, Any], values: dict[str, Any], number: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = {"monkeypatch": patch} if "monkeypatch" in fixtures else {}
        if "tmp_path" in fixtures:
            own["tmp_path"] = fixtures["tmp_path"] / f"row-{number}"
            own["tmp_path"].mkdir()
        test(*instance, **fixtures | values | own)

"""Suites that every engine, drafter, journal and strategy must pass, ours and other packages'.

    class TestDoubling(EngineConformance):
        @pytest.fixture
        def engine(self):
            return ENGINES.resolve("doubling").make("", kv_slots=512)

Each suite is a class whose docstring names its fixture. To extend a suite, add a method that starts with `test_`.
"""

import pytest

_SUITES = ("drafters", "engines", "journals", "sources", "step_outputs", "strategies")
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in _SUITES))  # so that a failure shows the values

"""One run of all stages of the method that a module tests by its `run`."""

import pytest

from tests.training.stages import make_places


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def output(request, places):
    result = request.module.run(places, "all")
    assert result.exit_code == 0, result.output
    return result.output

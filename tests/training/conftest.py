"""One run of all stages of the method that a module tests by its `run`."""

import pytest
import torch

from specq.engines.torch import load_network
from tests.training.stages import TARGET, make_places


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def output(request, places):
    result = request.module.run(places, "all")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def target():
    return load_network(TARGET, torch.device("cpu"))

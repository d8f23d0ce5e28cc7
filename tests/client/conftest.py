"""A client of the small broker."""

import pytest

import specq


@pytest.fixture
def client(broker, tmp_path):
    with specq.Client(broker.address, cache_dir=tmp_path) as client:
        yield client

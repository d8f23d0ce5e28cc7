"""A client of the small broker: of either kind, since both do the same."""

from contextlib import ExitStack

import pytest

import specq
from tests.client.asking import Blocking, running_loop


@pytest.fixture(params=[specq.Client, specq.AsyncClient], ids=["blocking", "asyncio"])
def connect(request, tmp_path, broker):
    """Make clients whose calls block; they are closed at the end."""
    with running_loop() as loop, ExitStack() as stack:

        def connect(address, **options):
            made = request.param(address, cache_dir=tmp_path, **options)
            client = made if request.param is specq.Client else Blocking(made, loop)
            stack.callback(client.close)
            return client

        yield connect


@pytest.fixture
def client(connect, broker):
    return connect(broker.address)

"""A gateway in front of the small broker, and clients of it. Both are shared by the tests of a module; a test that
counts what its gateway has done, or gives it options, starts its own (`tests.gateway.serving.running`)."""

from __future__ import annotations

import pytest

from specq.testing.fake_broker import FakeBroker, answer
from tests.gateway.serving import LIMITS, connected, openai_client, running


@pytest.fixture(scope="module")
def _broker(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, FakeBroker() as one:
        patch.setenv("SPECQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield one


@pytest.fixture
def broker(_broker):
    """The small broker, before its first message."""
    _broker.reply = answer
    _broker.heard.clear()
    return _broker


@pytest.fixture(scope="module")
def gateway(_broker):
    with running(_broker.address) as one:
        yield one


@pytest.fixture(scope="module")
def limited(_broker):
    """A gateway with small limits."""
    with running(_broker.address, **LIMITS) as one:
        yield one


@pytest.fixture
def http(gateway, broker):
    with connected(gateway) as client:
        yield client


@pytest.fixture
def api(gateway, broker):
    with openai_client(gateway) as client:
        yield client

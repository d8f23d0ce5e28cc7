"""A gateway in front of the small broker, and clients of it."""

from __future__ import annotations

import openai
import pytest

from tests.gateway.serving import connected, running


@pytest.fixture
def gateway(broker, own_cache):
    with running(broker.address) as one:
        yield one


@pytest.fixture
def http(gateway):
    with connected(gateway) as client:
        yield client


@pytest.fixture
def api(gateway):
    own = openai.DefaultHttpxClient(verify=False)  # as in `connected`
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=own) as client:
        yield client

"""The gateway: OpenAI's HTTP API in front of a broker. JSON in, JSON or server-sent events out.

    fields, *_call        bodies of requests, checked; pure
    idempotency, sse      requests that may be repeated, streams that may be taken up again; pure
    shapes, answers, responses_answer   results and pieces as JSON; pure
    errors                every refusal, in OpenAI's format
    serving               what is asked of the client, and of which
    api_keys, guard, connection   who gets in, and how much of it
    metrics               what is counted, for Prometheus
    routes/               the endpoints, one file a group; endpoint, replies: what they share
    app                   all of it as an ASGI application

To add a field: a line in a table of `fields` (or of the call that has it), and one in docs/http-api.md. To add an
endpoint: its route in a file of `routes/`.
"""

from specq.gateway.api_keys import ApiKeys, make_key
from specq.gateway.app import make_app
from specq.gateway.connection import limited_protocol
from specq.gateway.endpoint import Parts
from specq.gateway.replies import BodyLimits
from specq.gateway.serving import Upstream

__all__ = ["ApiKeys", "BodyLimits", "Parts", "Upstream", "limited_protocol", "make_app", "make_key"]

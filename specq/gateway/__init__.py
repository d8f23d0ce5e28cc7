"""The gateway: OpenAI's HTTP API, and Anthropic's, in front of a broker.

It takes JSON and returns JSON or server-sent events.

    fields, *_call        bodies of requests, checked; pure
    sse                   streams that may be resumed; pure
    shapes, answers, responses_answer, messages_answer   results and pieces as JSON; pure
    errors                every refusal, in the format of the path's API
    serving               requests to the clients of the broker, also repeated ones
    guard, connection     access and limits
    metrics               counts and times, for Prometheus
    uploads, batch_forms  uploads of files, and batches, as OpenAI has them; pure
    batch_lines           answers the lines of batches
    routes/               the endpoints, one file per group
    endpoint, replies     the common parts of endpoints
    app                   the ASGI application

To add a field, add a line in a table of `fields` or of its call. Add one in docs/http-api.md too. To add an endpoint,
add its route in a file of `routes/`.
"""

from specq.gateway.app import make_app
from specq.gateway.batch_lines import BatchLines
from specq.gateway.connection import limited_protocol
from specq.gateway.endpoint import Batching, Parts
from specq.gateway.guard import ApiKeys, make_key
from specq.gateway.metrics import Metrics
from specq.gateway.replies import BodyLimits
from specq.gateway.serving import Upstream

__all__ = [
    "ApiKeys",
    "BatchLines",
    "Batching",
    "BodyLimits",
    "Metrics",
    "Parts",
    "Upstream",
    "limited_protocol",
    "make_app",
    "make_key",
]

"""`/v1/responses`."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from specq.gateway import responses_call
from specq.gateway.answers import Answering
from specq.gateway.calls import Call
from specq.gateway.endpoint import Parts, endpoint
from specq.gateway.responses_answer import Responses
from specq.gateway.routes.completions import answer
from specq.gateway.shapes import ChatShape
from specq.text import TextCodec


def routes(parts: Parts) -> list[Route]:
    """Return the route."""
    return [Route("/v1/responses", endpoint(parts, partial(answer, responses_call.read, _responses)), methods=["POST"])]


def _responses(codec: TextCodec, call: Call) -> Answering:
    return Responses(call, ChatShape(codec, call.num_top))

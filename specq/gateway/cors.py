"""CORS: which foreign pages may ask from a browser (https://fetch.spec.whatwg.org/#http-cors-protocol).

Rule: it stands before the guard, since a browser asks without a key whether it may send one, and a page must be able to
read why it was refused. It opens nothing to those who are no browser: keys, names of hosts and limits are the guard's.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

METHODS = ("GET", "POST")
EXPOSED = ("retry-after", "www-authenticate")
PREFLIGHT_S = 600  # for which a browser need not ask again


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return the application for pages of these origins (`*`: all); as it is where there are none."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=["*"] if "*" in origins else [*origins],
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )

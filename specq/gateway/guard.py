"""Access and limits: host name, API key, and a key's requests in progress.

CORS decides which foreign pages may send requests from a browser (https://fetch.spec.whatwg.org/#http-cors-protocol).

Rule: CORS stands before the guard. A browser asks without a key whether it may send one. A page must be able to read
why it was refused. CORS gives no access to clients other than browsers. The guard checks keys, names of hosts and
limits.

The `Host` header has the name that a client uses for the gateway. Its check is pure.

With DNS rebinding, a foreign page makes browsers send requests here under its site's name. So names must be known.
Addresses are safe, since they need no name.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterator

import structlog
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specq.gateway.api_keys import NOBODY, ApiKeys, Caller
from specq.gateway.errors import ApiError
from specq.gateway.replies import error_response
from specq.protocol import ConfigError, split_host

METHODS = ("GET", "POST")
EXPOSED = ("retry-after", "www-authenticate")
PREFLIGHT_S = 600  # time in which a browser need not ask again


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return the application for pages of the `origins` (`*`: all); unchanged without origins."""
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


LOCAL = ("localhost",)


def is_known(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header (a name or an address, perhaps with a port) is allowed."""
    name, _ = split_host(host.strip().lower())
    return name in names or name in LOCAL or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


log = structlog.get_logger(__name__)

OPEN = ("/", "/health", "/ready", "/version")  # need no key
OPEN_UNDER = "/page/"  # the files of the page need no key; the page asks the user for it
KEY_HEADERS = ("X-Api-Key", "api-key")  # as sent by clients of Anthropic and Azure
CALLER = "specq.caller"


class Guard:
    """ASGI middleware around the app.

    keys         None: all callers are allowed.
    most         most requests of one key at a time.
    most_in_all  most requests of all keys at a time.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        keys: ApiKeys | None,
        most: int,
        header_bytes: int,
        most_in_all: int,
    ) -> None:
        self._app, self._hosts, self._keys = app, hosts, keys
        self._most, self._most_in_all = most, most_in_all
        self._header_bytes = header_bytes
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            caller = self._admit(Headers(scope=scope), scope["path"])
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope[CALLER] = caller
        self._under_way[caller.name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way[caller.name] -= 1
            if not self._under_way[caller.name]:
                del self._under_way[caller.name]

    def _admit(self, headers: Headers, path: str) -> Caller:
        """Return the caller of a request; raise ApiError if it has no access."""
        if sum(len(name) + len(value) for name, value in headers.raw) > self._header_bytes:
            raise ApiError(f"the headers are larger than {self._header_bytes} bytes", 431)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_known(hosts[0], self._hosts):
            raise ApiError("Host is not a name of this server (serve.hosts)", 421, "Host", "unknown_host")
        if path in OPEN or path.startswith(OPEN_UNDER):
            return NOBODY
        caller = self._caller(headers)
        if self._under_way.total() >= self._most_in_all:
            message = f"{self._most_in_all} requests are under way; try again when some have finished"
            raise ApiError(message, 503, code="too_many_requests", headers={"retry-after": "1"})
        if self._under_way[caller.name] >= self._most:
            message = f"{self._most} requests of this key are under way; try again when some have finished"
            raise ApiError(message, 429, code="too_many_requests", headers={"retry-after": "1"})
        return caller

    def _caller(self, headers: Headers) -> Caller:
        if self._keys is None:
            return NOBODY
        try:
            self._keys.refresh()
        except ConfigError as error:
            log.warning("api_keys_read_failed", reason=str(error))
        for key in _keys_in(headers):
            if caller := self._keys.caller(key):
                return caller
        message = f"no valid API key; send one as Authorization: Bearer KEY, or as {' or '.join(KEY_HEADERS)}: KEY"
        raise ApiError(message, 401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _keys_in(headers: Headers) -> Iterator[str]:
    """Yield the keys of a request. A client may send a placeholder beside the valid one."""
    for given in headers.getlist("authorization"):
        scheme, _, key = given.partition(" ")
        if scheme.lower() == "bearer":
            yield key.strip()
    yield from (key.strip() for name in KEY_HEADERS for key in headers.getlist(name))

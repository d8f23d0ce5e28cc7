"""Access and limits: host name, API key, and a key's requests in progress.

API keys: a file holds a name and a hash for each key, never the key itself.

    [alice]
    sha256 = "..."          # of the key
    max_priority = 0        # the highest priority of her jobs

A key has 256 random bits, so its plain hash does not reveal it. A changed file is read again. So a removed key is
refused from the next request on.

CORS decides which foreign pages may send requests from a browser (https://fetch.spec.whatwg.org/#http-cors-protocol).

Rule: CORS stands before the guard. A browser asks without a key whether it may send one. A page must be able to read
why it was refused. CORS gives no access to clients other than browsers. The guard checks keys, names of hosts and
limits.

The `Host` header has the name that a client uses for the gateway. Its check is pure.

With DNS rebinding, a foreign page makes browsers send requests here under its site's name. So names must be known.
Addresses are safe, since they need no name."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import secrets
import stat
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specq.gateway.errors import ApiError
from specq.gateway.replies import error_response
from specq.protocol import ConfigError, bounds, split_host

PREFIX = "sk-specq-"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request; the broker gives each name its own share. `max_priority` None means no limit."""

    name: str = ""
    max_priority: int | None = None


NOBODY = Caller()  # the caller without keys


class ApiKeys:
    """The keys in a file.

    Raises ConfigError if the file cannot be read. If it cannot be read later, the known keys stay valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: object = None
        self._callers: dict[str, Caller] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the file if it has changed."""
        try:
            about = self._path.stat()
        except OSError as error:
            raise ConfigError(f"cannot read the API keys {self._path}: {error.strerror}") from None
        stamp = (
            about.st_mtime_ns,
            about.st_ctime_ns,
            about.st_size,
            about.st_ino,
        )  # compared for equality only, so no clock orders them
        if stamp != self._stamp:
            self._callers = read_file(self._path)
            self._stamp = stamp

    def caller(self, key: str) -> Caller | None:
        """Return the caller of this key, or None."""
        return self._callers.get(digest(key))


def digest(key: str) -> str:
    """Return the form in which the file holds a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_file(path: Path) -> dict[str, Caller]:
    """Return the callers by the digest of their key.

    Raises ConfigError that names the error, but no digest.
    """
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            raise ConfigError(f"other users can write {path}; run chmod 600 on it")
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the API keys {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a valid file of API keys: it is not valid TOML") from None
    callers: dict[str, Caller] = {}
    for name, table in tables.items():
        found = _check(path, name, table)
        callers[found] = Caller(name, table.get("max_priority", 0))
    return callers


def _check(path: Path, name: str, table: Any) -> str:
    """Return a key's digest; raise ConfigError if the table does not describe a key."""
    known = {"sha256", "max_priority"}
    priority = table.get("max_priority", 0) if isinstance(table, dict) else 0
    right = (
        isinstance(table, dict) and set(table) <= known and type(priority) is int and bounds.PRIORITY.admits(priority)
    )
    found = table.get("sha256") if right else None
    if not isinstance(found, str) or not _DIGEST.fullmatch(found) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"[{name}] in {path} is not an API key; it has sha256 (64 hex digits), max_priority (a number)"
        )
    return found


def make_key(path: Path, name: str, *, max_priority: int = 0) -> str:
    """Add a new key to a file, and return the key. The file is created if it does not exist.

    Raises ConfigError if the name is already in the file.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name for a key: up to 64 letters, digits, and _ - (not first)")
    if not bounds.PRIORITY.admits(max_priority):
        raise ConfigError(f"max_priority is {max_priority}, but must be {bounds.PRIORITY.allowed}")
    taken = [caller.name for caller in read_file(path).values()] if path.exists() else []
    if name in taken:
        raise ConfigError(f"{path} already has a key of {name}; remove its table first")
    key = PREFIX + secrets.token_urlsafe(32)
    entry = f'[{name}]\nsha256 = "{digest(key)}"\n' + (f"max_priority = {max_priority}\n" if max_priority else "")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="ascii") as file:
            file.write(entry)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return key


METHODS = ("GET", "POST", "DELETE")
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

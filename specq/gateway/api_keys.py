"""API keys: which callers may send requests. A file holds a name and a hash for each key, never the key itself.

    [alice]
    sha256 = "..."          # of the key
    max_priority = 0        # the highest priority of her jobs

A key has 256 random bits, so its plain hash does not reveal it. A changed file is read again. So a removed key is
refused from the next request on.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.protocol import PRIORITY, ConfigError

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
    right = isinstance(table, dict) and set(table) <= known and type(priority) is int and PRIORITY.admits(priority)
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
    if not PRIORITY.admits(max_priority):
        raise ConfigError(f"max_priority is {max_priority}, but must be {PRIORITY.allowed}")
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

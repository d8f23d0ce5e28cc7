"""CURVE keys: who may connect, and what each key may do. With keys, all messages are encrypted and signed.

A key pair is two files in a directory. NAME.secret is for its owner alone, NAME.pub may be shared.

- broker: its own secret, and the .pub file of each key that may connect. Its directory is the allow-list.
- all others: their own secret and the broker's .pub.

The option `keys` is such a directory, or DIRECTORY/NAME if it holds several secrets of one role.

Rule: the rights of a key come from its .pub file at the broker. Its owner's files do not count. Secrets are never
logged: `repr` leaves them out.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from specq.protocol import ConfigError, bounds

ROLES = ("broker", "target", "draft", "client")
CLIENT_ROLES = ("client", "broker")  # roles for a client: the broker's key may ask for the broker's state
MAX_PRIORITY = int(bounds.PRIORITY.high)  # of a job, and its negative the lowest
SECRET, PUBLIC = ".secret", ".pub"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
RIGHTS = ("trusted", "max_priority", "tenants")
_KEY_LENGTH = 40  # characters of a key in Z85, for its 32 bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A process's own keys, in Z85."""

    name: str
    public_key: bytes
    secret_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys of a connection: the own pair, and the public key that the other side must have."""

    own: KeyPair
    server_key: bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a key.

    - `trusted`: of a drafter, whether its draft distributions are used.
    - `max_priority`: of a client, the highest priority of its jobs.
    - `tenants`: of a client, whether it may submit jobs for tenants, as a gateway does.
    """

    name: str
    public_key: bytes
    roles: tuple[str, ...]
    trusted: bool = False
    max_priority: int = 0
    tenants: bool = False


class AllowList:
    """The public keys of a directory that have a role, by name. "": any role. Changed files are read again.

    `grants` stays the same dict. Raises ConfigError if a file is malformed. `refresh` then keeps the previous values.
    """

    def __init__(self, directory: Path, role: str = "") -> None:
        self.grants: dict[str, Grant] = {}
        self._directory, self._role = directory, role
        self._stamp: object = None
        self.refresh()

    def refresh(self) -> None:
        """Read the files if they have changed."""
        stamp = _stamp(self._directory)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        found = {grant.name: grant for grant in read_grants(self._directory) if self._role in ("", *grant.roles)}
        self.grants.clear()
        self.grants.update(found)

    def user_id(self, public_key: bytes) -> str:
        """Return the mark of each message of a connection with this key (in Z85). "" if the key is not on the list.

        The mark has the name and the key itself, since another key may have this name later.
        """
        name = self.name_of(public_key)
        return f"{name} {public_key.decode()}" if name else ""

    def who(self, user_id: str) -> str:
        """Return the name of the key that marked a message.

        "" if the list has no such key, or another one of that name.
        """
        name, _, key = user_id.partition(" ")
        grant = self.grants.get(name)
        return name if grant is not None and grant.public_key == key.encode() else ""

    def name_of(self, public_key: bytes) -> str:
        """Return the name of a key (in Z85), or "" if it is not on the list."""
        return next((grant.name for grant in self.grants.values() if grant.public_key == public_key), "")


# --- making -----------------------------------------------------------------------------------------------------------


def make_keys(
    directory: Path,
    name: str,
    roles: tuple[str, ...],
    *,
    trusted: bool = False,
    max_priority: int = 0,
    tenants: bool = False,
) -> tuple[Path, Path]:
    """Write a new key pair, and return the secret and the public file. Never overwrites a file.

    Raises ConfigError if the name, the rights or the directory cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name for keys: up to 64 letters, digits, and . _ - (not first)")
    if trusted and "draft" not in roles:
        raise ConfigError(f"only drafters can be trusted; the roles of {name} are {', '.join(roles)}")
    if (max_priority or tenants) and "client" not in roles:
        right = "priorities" if max_priority else "tenants"
        raise ConfigError(f"only clients have {right}; the roles of {name} are {', '.join(roles)}")
    if abs(max_priority) > MAX_PRIORITY:
        raise ConfigError(f"max_priority is {max_priority}, but must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    rights = "trusted = true\n" * trusted + "tenants = true\n" * tenants
    rights += f"max_priority = {max_priority}\n" * bool(max_priority)
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    shared = f'roles = [{", ".join(map(_quoted, roles))}]\npublic_key = "{public_key}"\n'
    secret_path, public_path = (directory / f"{name}{ending}" for ending in (SECRET, PUBLIC))
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_new(secret_path, f'# The secret key of {name}.\n{shared}secret_key = "{secret_key}"\n')
        _write_new(public_path, shared + rights)
    except FileExistsError as error:
        raise ConfigError(f"{error.filename} already exists; choose another name, or delete that file first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return secret_path, public_path


def _quoted(text: str) -> str:
    return f'"{text}"'


def _write_new(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)


# --- reading ----------------------------------------------------------------------------------------------------------


def directory_of(keys: str) -> Path:
    """Return the directory that the option `keys` names. Raises ConfigError."""
    path, is_directory = _place(keys)
    return path if is_directory else path.parent


def own_keys(keys: str, *roles: str) -> KeyPair:
    """Return the own keys for the first role in `roles` that has any. Raises ConfigError."""
    path, is_directory = _place(keys)
    if not is_directory:
        secret = path.with_name(path.name + SECRET)
        if not secret.exists():
            hint = f"specq keys {keys} NAME --role {roles[0]}"
            raise ConfigError(f"there is neither a directory of keys {keys} nor a key {secret}; to create one: {hint}")
        return _own(secret, roles)
    secrets = {secret: _read(secret)["roles"] for secret in sorted(path.glob("*" + SECRET))}
    for role in roles:
        found = [secret for secret, its in secrets.items() if role in its]
        if len(found) > 1:
            names = " or ".join(f"{keys}/{secret.stem}" for secret in found)
            raise ConfigError(f"{keys} contains several keys of the role {role}; name one: {names}")
        if found:
            return _own(found[0], roles)
    raise ConfigError(
        f"{keys} contains no secret key of the role {roles[0]}; create one: specq keys {keys} NAME --role {roles[0]}"
    )


def keys_of_gateway(keys: str) -> str:
    """Return the option `keys` for a gateway, as DIRECTORY/NAME: a key that joins the directory later changes nothing.

    Of several keys of clients, the only one that may submit for tenants is taken. Raises ConfigError if none is.
    """
    path, is_directory = _place(keys)
    if not keys or not is_directory:
        return keys
    able = [grant.name for grant in read_grants(path) if grant.tenants and (path / (grant.name + SECRET)).exists()]
    return f"{keys}/{able[0] if len(able) == 1 else own_keys(keys, *CLIENT_ROLES).name}"


def curve_to_broker(keys: str, *roles: str) -> Curve | None:
    """Return the keys for a connection to the broker, in one of `roles`. None without keys. Raises ConfigError."""
    if not keys:
        return None
    own, directory = own_keys(keys, *roles), directory_of(keys)
    brokers = [grant for grant in read_grants(directory) if "broker" in grant.roles]
    if len(brokers) != 1:
        names = ", ".join(grant.name for grant in brokers) or "none"
        raise ConfigError(
            f"{directory} must contain the public key ({PUBLIC}) of the one broker to connect to; it has {names}"
        )
    return Curve(own, brokers[0].public_key)


def read_grants(directory: Path) -> Iterator[Grant]:
    """Yield the grants in the public files of a directory.

    Raises ConfigError for a malformed file, or a key that occurs twice.
    """
    names: dict[bytes, str] = {}
    for path in sorted(directory.glob("*" + PUBLIC)):
        values = _read(path)
        rights = {right: values[right] for right in RIGHTS if right in values}
        grant = Grant(path.stem, values["public_key"].encode(), tuple(values["roles"]), **rights)
        other = names.setdefault(grant.public_key, grant.name)
        if other != grant.name:
            raise ConfigError(f"{path} contains the same key as {other}{PUBLIC}")
        yield grant


def _place(keys: str) -> tuple[Path, bool]:
    """Return the path that the option `keys` names, and whether it is a directory.

    Raises ConfigError if that is unreadable.
    """
    try:
        path = Path(keys).expanduser()
        return path, path.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~NAME of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the keys {keys}: {reason}; `keys` is a directory, or DIRECTORY/NAME") from None


def _own(path: Path, roles: tuple[str, ...]) -> KeyPair:
    values = _read(path)
    if not set(roles) & set(values["roles"]):
        raise ConfigError(
            f"{path} is a key of the role {', '.join(values['roles'])}; expected one of {', '.join(roles)}"
        )
    about = path.stat()
    if readable_by_others(about.st_mode, about.st_uid, os.geteuid()):
        raise ConfigError(f"other users can read {path}; run chmod 600 on it")
    if "secret_key" not in values:
        raise ConfigError(f"{path} has no secret_key")
    return KeyPair(path.stem, values["public_key"].encode(), values["secret_key"].encode())


def readable_by_others(mode: int, owner: int, user: int) -> bool:
    """Return whether a secret file gives too many rights, for a process of `user`.

    A file of root may be readable by a group, as in PostgreSQL: so Kubernetes mounts secrets for users other than root.
    """
    return bool(mode & (0o037 if owner == 0 != user else 0o077))


def _read(path: Path) -> dict[str, Any]:
    """Return a key file's values. Raises ConfigError, whose text never contains the values."""
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not a valid key file: it is not valid TOML") from None
    if not _is_key_file(values):
        known = f"roles (of {', '.join(ROLES)}), public_key, secret_key, {', '.join(RIGHTS)}"
        raise ConfigError(f"{path} is not a valid key file: a key has {known}; keys are {_KEY_LENGTH} characters")
    return values


def _is_key_file(values: dict[str, Any]) -> bool:
    roles, trusted, highest = values.get("roles"), values.get("trusted", False), values.get("max_priority", 0)
    keys = [values.get("public_key"), *([values["secret_key"]] if "secret_key" in values else [])]
    return (
        values.keys() <= {"roles", "public_key", "secret_key", *RIGHTS}
        and isinstance(roles, list)
        and bool(roles)
        and all(role in ROLES for role in roles)
        and all(isinstance(key, str) and len(key) == _KEY_LENGTH and key.isascii() for key in keys)
        and isinstance(trusted, bool)
        and isinstance(values.get("tenants", False), bool)
        and type(highest) is int
        and abs(highest) <= MAX_PRIORITY
    )


def _stamp(directory: Path) -> list[tuple[str | int, ...]]:
    """Return a value that changes with the files. A new file may have the same size and write time."""
    found: list[tuple[str | int, ...]] = []
    for path in sorted(directory.glob("*" + PUBLIC)):
        try:
            about = path.stat()
        except FileNotFoundError:
            continue
        found.append((path.name, about.st_mtime_ns, about.st_ctime_ns, about.st_size, about.st_ino))
    return found

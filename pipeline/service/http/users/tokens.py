"""The users of a service: a file with lines `NAME sha256:HEX [role=…] [group=…] [expires=…]`: a token's hash, and what
it allows."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pipeline.errors import ParameterError

LOG = logging.getLogger("millrace.service")
Role = Literal["viewer", "user", "operator"]
ROLES: tuple[Role, ...] = ("viewer", "user", "operator")
NO_GROUP = ""  # the group of those without one
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LINE = re.compile(
    rf"(?P<name>{_NAME.pattern})\s+sha256:(?P<digest>[0-9a-f]{{64}})"
    rf"(?P<more>(?:\s+(?:role=(?:{'|'.join(ROLES)})|group={_NAME.pattern}(?:,{_NAME.pattern})*|expires=\S+))*)"
)
_FORM = "NAME sha256:HEX [role=…] [group=…] [expires=…]"
_AGE = re.compile(r"([1-9][0-9]{0,4})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}
_ID_DIGITS = 8


@dataclass(frozen=True)
class User:
    """Who makes a request. Viewers only look; operators see and change everything."""

    name: str
    role: Role = "user"
    groups: tuple[str, ...] = (NO_GROUP,)  # new jobs belong to the first
    by: Literal["token", "session", "proxy", "loopback"] = field(default="token", compare=False)  # how that is known

    @property
    def is_operator(self) -> bool:
        return self.role == "operator"

    def sees(self, group: str) -> bool:
        """Whether the jobs of a group are shown."""
        return self.is_operator or group in self.groups

    @property
    def visible_groups(self) -> tuple[str, ...] | None:
        """The groups whose jobs are shown; None: all."""
        return None if self.is_operator else self.groups


@dataclass(frozen=True, kw_only=True)
class Token:
    """One line of the file."""

    digest: str
    user: User
    expires_at: float | None = None  # seconds since 1970

    @property
    def id(self) -> str:
        return self.digest[:_ID_DIGITS]

    def is_valid(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at

    def line(self) -> str:
        said = [self.user.name, f"sha256:{self.digest}"]
        if self.user.role != User.role:
            said.append(f"role={self.user.role}")
        if self.user.groups != User.groups:
            said.append(f"group={','.join(self.user.groups)}")
        if self.expires_at is not None:
            said.append(f"expires={datetime.fromtimestamp(self.expires_at, UTC):%Y-%m-%dT%H:%M:%SZ}")
        return " ".join(said)


def new_token() -> str:
    """A random token, to be shown once."""
    return f"mr_{secrets.token_urlsafe(32)}"


def token_line(
    name: str, token: str, role: Role = User.role, groups: Sequence[str] = (), expires_at: float | None = None
) -> str:
    """The line in the file for a token. ParameterError for an invalid name or group."""
    for what, each in (("name", name), *(("group", group) for group in groups)):
        if not is_name(each):
            raise ParameterError(f"{each!r}: a {what} has up to 64 letters, digits and . _ @ -")
    user = User(name, role, tuple(dict.fromkeys(groups)) or User.groups)
    return Token(digest=digest_of(token), user=user, expires_at=expires_at).line()


def is_name(text: str) -> bool:
    """Whether a user or a group may be called so."""
    return _NAME.fullmatch(text) is not None


def expiry(text: str, now: float) -> float:
    """Seconds since 1970 of an age (12h, 90d, 4w) from `now`, or of a date or time (2027-01-31, UTC without a zone).
    Raises ParameterError, also if that is past."""
    age = _AGE.fullmatch(text)
    found = now + timedelta(hours=int(age[1]) * _HOURS[age[2]]).total_seconds() if age else _moment(text)
    if found <= now:
        raise ParameterError(f"expires {text!r}: is past; choose a later date")
    return found


def _moment(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise ParameterError(f"expires {text!r}: write an age such as 90d, or a date such as 2027-01-31") from error


class Tokens:
    """The tokens of a file when it was read."""

    def __init__(self, path: Path, *, none_allowed: bool = False) -> None:
        """ParameterError names a wrong line; also raised without any token, unless `none_allowed`."""
        self._tokens = {token.digest: token for _, token in _parsed(path, _text(path)) if token is not None}
        if not self._tokens and not none_allowed:
            raise ParameterError(
                f"tokens_file {path}: holds no token; add a line that `millrace token create NAME` prints"
            )

    def __iter__(self) -> Iterator[Token]:
        return iter(self._tokens.values())

    def user(self, token: str) -> User | None:
        """Whose token it is, unless it has expired. Compares every line in constant time, so that timing reveals
        nothing."""
        digest, user = digest_of(token), None
        for held, found in self._tokens.items():
            if hmac.compare_digest(held, digest) and found.is_valid(time.time()):
                user = found.user
        return user

    def with_digest(self, digest: str) -> Token | None:
        """The token with this hash, unless it has expired."""
        found = self._tokens.get(digest)
        return found if found is not None and found.is_valid(time.time()) else None


class TokensFile:
    """The current tokens of a file. Thread-safe.

    If the file becomes invalid, the tokens read before stay valid and the log says so once; if its last line is
    removed, all requests are refused.
    """

    def __init__(self, path: Path) -> None:
        """ParameterError as `Tokens` raises it."""
        self._path = path
        self._read_from = self._version()
        self._tokens = Tokens(path)
        self._fault = ""
        self._lock = threading.Lock()

    def now(self) -> Tokens:
        """The tokens, read again if the file has changed."""
        with self._lock:
            version = self._version()
            if version != self._read_from:
                try:
                    self._tokens = Tokens(self._path, none_allowed=True)
                    self._read_from, self._fault = version, ""
                except ParameterError as error:
                    if str(error) != self._fault:
                        self._fault = str(error)
                        LOG.error("%s; the tokens read before stay valid", error)
            return self._tokens

    def _version(self) -> tuple[int, ...] | None:
        """Differs after the file is changed or replaced; None if there is no such file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def add_line(path: Path, line: str) -> None:
    """Appends a line to a tokens file, which is created if it is missing."""
    try:
        ends_amid_a_line = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:  # noqa: PTH123 - a descriptor
            file.write(f"{chr(10) if ends_amid_a_line else ''}{line}\n".encode())
    except OSError as error:
        raise ParameterError(
            f"tokens_file {path}: {error.strerror}; leave out --file, and add the line yourself"
        ) from error


def revoke(path: Path, who: str) -> list[Token]:
    """Removes the tokens of a user, or the one with an id, from a file, and returns them. ParameterError if there is
    none, or the file cannot be rewritten."""
    kept: list[str] = []
    gone: list[Token] = []
    for line, token in _parsed(path, _text(path)):
        if token is not None and who in (token.user.name, token.id):
            gone.append(token)
        else:
            kept.append(line)
    if not gone:
        raise ParameterError(f"tokens_file {path}: has no token of {who}; `millrace token list` shows those it has")
    try:
        _replace(path, "".join(f"{line}\n" for line in kept))
    except OSError as error:
        raise ParameterError(f"tokens_file {path}: {error.strerror}; remove the line of {who} yourself") from error
    return gone


def _replace(path: Path, text: str) -> None:
    """The new content appears at once; owner and permissions stay."""
    path = Path(os.path.realpath(path))
    before, new = path.stat(), path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with new.open("x", encoding="utf-8") as file:
            os.fchmod(file.fileno(), before.st_mode & 0o7777)
            with suppress(PermissionError):
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"tokens_file {path}: {error.strerror}; choose one that this user may read") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"tokens_file {path}: is not a text of lines that `millrace token` prints") from error


def _parsed(path: Path, text: str) -> Iterator[tuple[str, Token | None]]:
    """Each line, with its token unless it is empty or a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            yield line, None
            continue
        found = _LINE.fullmatch(line.strip())
        try:
            if found is None:
                raise ParameterError(f"is not {_FORM}, as `millrace token create` prints")
            yield line, _token(found)
        except ParameterError as error:
            raise ParameterError(f"tokens_file {path}, line {number}: {error}") from error


def _token(found: re.Match[str]) -> Token:
    pairs = [each.partition("=")[::2] for each in found["more"].split()]
    more = dict(pairs)
    if len(more) < len(pairs):
        raise ParameterError(f"is not {_FORM}: it has the same key twice")
    role = next((each for each in ROLES if each == more.get("role")), User.role)
    groups = tuple(dict.fromkeys(more["group"].split(","))) if "group" in more else User.groups
    expires_at = _moment(more["expires"]) if "expires" in more else None
    return Token(digest=found["digest"], user=User(found["name"], role, groups), expires_at=expires_at)


def digest_of(token: str) -> str:
    # Tokens are 32 random bytes: a slow hash against guessing is not needed.
    return hashlib.sha256(token.encode()).hexdigest()

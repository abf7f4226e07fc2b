"""The users of a service: a file with lines `NAME sha256:HEX [role=ROLE]`, the hash of a token and what it allows."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ParameterError

LOG = logging.getLogger("millrace.service")
# The first is that of lines without one.
ROLES = ("user", "operator")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LINE = re.compile(
    rf"(?P<name>{_NAME.pattern})\s+sha256:(?P<digest>[0-9a-f]{{64}})(?:\s+role=(?P<role>{'|'.join(ROLES)}))?"
)


@dataclass(frozen=True)
class User:
    """Who makes a request."""

    name: str
    is_operator: bool = False  # may raise priorities


def new_token() -> str:
    """A random token, to be shown once."""
    return f"mr_{secrets.token_urlsafe(32)}"


def token_line(name: str, token: str, role: str = ROLES[0]) -> str:
    """The line in the file for a token with one of `ROLES`. ParameterError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ParameterError(f"{name!r}: a name has up to 64 letters, digits and . _ @ -")
    return f"{name} sha256:{_digest(token)}" + (f" role={role}" if role != ROLES[0] else "")


class Tokens:
    """The tokens of a file when it was read."""

    def __init__(self, path: Path, *, none_allowed: bool = False) -> None:
        """ParameterError names a wrong line; also raised without any token, unless `none_allowed`."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ParameterError(f"tokens_file {path}: {error.strerror}; choose one that this user may read") from error
        except UnicodeDecodeError as error:
            raise ParameterError(f"tokens_file {path}: is not a text of lines that `millrace token` prints") from error
        self._users: dict[str, User] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise ParameterError(
                    f"tokens_file {path}, line {number}: is not NAME sha256:HEX [role=…], as `millrace token` prints"
                )
            self._users[found["digest"]] = User(found["name"], is_operator=found["role"] == "operator")
        if not self._users and not none_allowed:
            raise ParameterError(f"tokens_file {path}: holds no token; add a line that `millrace token NAME` prints")

    def user(self, token: str) -> User | None:
        """Whose token it is. Compares every line in constant time, so that timing reveals nothing."""
        digest, user = _digest(token), None
        for held, found in self._users.items():
            if hmac.compare_digest(held, digest):
                user = found
        return user


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


def _digest(token: str) -> str:
    # Tokens are 32 random bytes: a slow hash against guessing is not needed.
    return hashlib.sha256(token.encode()).hexdigest()

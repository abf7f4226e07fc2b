"""Who may use the service: a file of names and hashed tokens, one `NAME sha256:HEX` a line."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import threading
from pathlib import Path

from pipeline.errors import ParameterError

LOG = logging.getLogger("millrace.service")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_LINE = re.compile(rf"(?P<name>{_NAME.pattern})\s+sha256:(?P<digest>[0-9a-f]{{64}})")


def new_token() -> str:
    """A token that nobody can guess, to be shown once."""
    return f"mr_{secrets.token_urlsafe(32)}"


def token_line(name: str, token: str) -> str:
    """What stands in the file for a token. ParameterError for a name that cannot stand there."""
    if not _NAME.fullmatch(name):
        raise ParameterError(f"{name!r}: a name has letters, digits and . _ @ - alone, 64 at most")
    return f"{name} sha256:{_digest(token)}"


class Tokens:
    """The tokens of a file, as it stood when it was read."""

    def __init__(self, path: Path, *, none_allowed: bool = False) -> None:
        """ParameterError names the line that is wrong; also where there is no token at all, unless that is allowed."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ParameterError(f"tokens_file {path}: {error.strerror}; name one that this user may read") from error
        except UnicodeDecodeError as error:
            raise ParameterError(f"tokens_file {path}: is no text of lines that `millrace token` prints") from error
        self._owners: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise ParameterError(
                    f"tokens_file {path}, line {number}: is not NAME sha256:HEX, as `millrace token` prints"
                )
            self._owners[found["digest"]] = found["name"]
        if not self._owners and not none_allowed:
            raise ParameterError(f"tokens_file {path}: holds no token; add a line that `millrace token NAME` prints")

    def owner(self, token: str) -> str | None:
        """Whose token it is. Every line is compared, in constant time, so that the time says nothing."""
        digest, owner = _digest(token), None
        for held, name in self._owners.items():
            if hmac.compare_digest(held, digest):
                owner = name
        return owner


class TokensFile:
    """The tokens of a file as it stands when they are asked for, by whichever thread.

    Where it has been damaged those read before stay in force, and the log says so once; where its last line was removed
    nobody is let in.
    """

    def __init__(self, path: Path) -> None:
        """ParameterError as `Tokens` raises it."""
        self._path = path
        self._read_from = self._version()
        self._tokens = Tokens(path)
        self._fault = ""
        self._lock = threading.Lock()

    def now(self) -> Tokens:
        """Read again if the file has changed."""
        with self._lock:
            version = self._version()
            if version != self._read_from:
                try:
                    self._tokens = Tokens(self._path, none_allowed=True)
                    self._read_from, self._fault = version, ""
                except ParameterError as error:
                    if str(error) != self._fault:
                        self._fault = str(error)
                        LOG.error("%s; the tokens read before stay in force", error)
            return self._tokens

    def _version(self) -> tuple[int, ...] | None:
        """What a file that is changed or replaced has another one of; None where there is no such file."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(token: str) -> str:
    # Tokens are 32 random bytes: there is nothing to guess that a slow hash would protect.
    return hashlib.sha256(token.encode()).hexdigest()

"""Objects of S3, Google Cloud Storage, Azure Blob Storage and web servers, as paths.

`s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `az://CONTAINER/KEY` and `https://HOST/PATH` travel as `ObjectPath`. Its methods
make requests through obstore, which is imported on first use, repeats failed requests with back-off, and takes
credentials, region and endpoint from the environment. A URL never holds credentials: messages and receipts show it.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from pipeline.errors import InputError, MillraceError, OutputError, StorageError

T = TypeVar("T")

Version = Mapping[str, str]  # ETag, or as Google Cloud Storage counts

# One request, connecting included; and all repetitions of a failed one, after growing pauses.
REQUEST_S, CONNECT_S, RETRY_S, FIRST_PAUSE_S = 30.0, 5.0, 60.0, 0.1
_RETRIES = 10
INSTALL = "pip install obstore"

_URL = re.compile(r"(s3|gs|az|https?)://", re.IGNORECASE)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_ENDPOINTS = re.compile(
    r"(AWS|GOOGLE|AZURE)_\w*(ENDPOINT|BASE_URL)\w*|AZURE_STORAGE_USE_EMULATOR|GOOGLE_SERVICE_ACCOUNT_KEY"
)
_ENDPOINT_URLS = re.compile(r"(AWS|GOOGLE|AZURE)_(STORAGE_)?(ENDPOINT(_URL(_S3)?)?|BASE_URL)")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_UNTRUSTED = re.compile(r"InvalidCertificate\(\s*(\w+)")
_HTTP_ERROR = re.compile(r".*HTTP error: ([^\n]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_DENIED = ("401", "403")
_TRY_LATER = ("408", "429")
_IMDS = ("169.254.169.254", "metadata.google.internal")  # asked for credentials if the environment has none
_DELETED_AT_ONCE = 1000


class ChangedError(Exception):
    """The object exists although it should not, or is not the version that was read."""


def buffer_of(write: Callable[[io.BytesIO], object]) -> bytes:
    """What a function writes into a file."""
    with io.BytesIO() as file:
        write(file)
        return file.getvalue()


def version_of(meta: Mapping[str, Any]) -> Version:
    """What `head`, `get` and `put` say of an object's version."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


def is_url(name: str | os.PathLike[str]) -> bool:
    """Whether a name is a URL of an object."""
    return _URL.match(os.fspath(name)) is not None


def path_named(name: str) -> Path:
    """The object or file of that name. InputError if it is a URL with credentials, or a damaged one."""
    return ObjectPath.of(name) if is_url(name) else Path(name)


class ObjectPath(PosixPath):
    """The path of an object, or of several below it; `str` gives its URL.

    FileNotFoundError if there is no such object. InputError for a missing bucket or refused access in reading,
    OutputError in writing; StorageError if the credentials have expired, or the server does not answer in time.
    """

    __slots__ = ()

    @classmethod
    def of(cls, url: str) -> ObjectPath:
        """InputError if the URL has user name, password, query or fragment, or no bucket."""
        parts = urlsplit(url)
        scheme, host = parts.scheme.lower(), parts.netloc.rpartition("@")[2]
        shown = f"{scheme}://{host}"
        if "@" in parts.netloc or (scheme.startswith("http") and (parts.query or parts.fragment)):
            raise InputError(
                f"{shown}/…: a URL with a user name, a password or a signature would be shown in receipts and logs; "
                "leave it out, and set credentials in the environment"
            )
        # In a bucket, any character may be part of a key.
        key = unquote(parts.path) if scheme.startswith("http") else url.split("://", 1)[1].partition("/")[2]
        names = [name for name in key.split("/") if name]
        if not host or {".", ".."} & set(names) or not key.isprintable():
            raise InputError(f"{shown}/{key!a}: is not the URL of an object; write it as {scheme}://BUCKET/KEY")
        return cls(f"{scheme}:", host, *names)

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":")
        return f"{scheme}://{rest.lstrip('/')}"

    def __reduce__(self) -> Any:
        return type(self), self.parts

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def bucket(self) -> str:
        """The bucket, container or host."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Its name within the bucket."""
        return "/".join(self.parts[2:])

    @property
    def store(self) -> Any:
        """obstore's client of the bucket, shared by all paths of this process."""
        return _store(self)

    @property
    def store_below(self) -> Any:
        """Another client, of the objects below this path."""
        return _opened(self, self.key)

    # What a Path offers, by requests

    def absolute(self) -> ObjectPath:
        return self

    def is_symlink(self) -> bool:
        return False

    def is_dir(self) -> bool:
        """False: an object store has no folders."""
        return False

    def is_file(self) -> bool:
        return self.exists()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            self.head()
        except FileNotFoundError:
            return False
        return True

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size and time of the last change."""
        try:
            found = self.head()
        except FileNotFoundError:
            self.get(None, (0, 1))  # tells a missing bucket
            raise
        seconds = found["last_modified"].timestamp()
        times = (seconds,) * 3
        return os.stat_result(
            (stat.S_IFREG | 0o666, 0, 0, 1, 0, 0, found["size"], *times), {"st_mtime_ns": round(seconds * 10**9)}
        )

    def lstat(self) -> os.stat_result:
        return self.stat()

    def read_bytes(self) -> bytes:
        return bytes(self.get()[0])

    def write_bytes(self, data: Any) -> int:
        self.put([data])
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            requested(self, OutputError, lambda: self.store.delete(self.key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def iterdir(self) -> Generator[Any, None, None]:
        """Objects and common prefixes one level below. InputError if the server does not list."""
        if not self.lists:
            raise InputError(f"{self}: a web server does not list what is below; name the array or file itself")
        found = requested(self, InputError, lambda: self.store.list_with_delimiter(self.key))
        names = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in sorted(names))

    @property
    def lists(self) -> bool:
        """Whether the server can be asked for names; of web servers, few can."""
        return not self.scheme.startswith("http")

    def glob(self, pattern: str, **_: Any) -> Generator[Any, None, None]:
        """The entries of `iterdir` whose names match; none if the server does not list."""
        if self.lists:
            yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # What only objects offer

    def head(self) -> dict[str, Any]:
        """size (bytes), last_modified, e_tag, version."""
        try:
            return dict(requested(self, InputError, lambda: self.store.head(self.key)))
        except InputError:  # an answer without a body gives no reason; some web servers refuse HEAD
            return self.get(None, (0, 1))[1]

    def get(self, limit: int | None = None, span: tuple[int, int] | None = None) -> tuple[Any, dict[str, Any]]:
        """Its bytes, or those from the first number of `span` up to the second, as a buffer, and what `head` gives.

        ValueError, before they are read, if it has more bytes than `limit`; also if it ends before `span` begins.
        """
        options: Any = None if span is None else {"range": span}

        def call() -> tuple[Any, dict[str, Any]]:
            found = self.store.get(self.key, options=options)
            if limit is not None and found.meta["size"] > limit:
                raise ValueError(f"it has {found.meta['size']:,} bytes, more than the {limit:,} that belong there")
            return found.bytes(), found.meta

        return requested(self, InputError, call)

    def get_ranges(self, starts: Sequence[int], lengths: Sequence[int]) -> list[Any]:
        """Buffers of several ranges, close ones by one request; shorter ones where the object ends."""
        call = partial(self.store.get_ranges, self.key, starts=list(starts), lengths=list(lengths))
        return list(requested(self, InputError, call))

    def put(self, buffers: Sequence[Any], *, replaces: Version | None = None, new: bool = False) -> Version:
        """Write the object, of these buffers, all or nothing. Returns its version.

        replaces : only in place of this version; ChangedError if it is another
        new      : only if there is none; ChangedError if there is one
        """
        if not self.lists:  # nor does such a server know conditions
            if new and self.exists():
                raise ChangedError(str(self))
            new, replaces = False, None
        mode: Any = "create" if new else "overwrite" if replaces is None else dict(replaces)
        whole = [memoryview(each).cast("B") for each in buffers if len(each)]
        data: Any = whole[0] if len(whole) == 1 else b"".join(whole)
        if not isinstance(data, bytes) and not data.contiguous:
            data = bytes(data)
        found: dict[str, Any] = requested(self, OutputError, lambda: self.store.put(self.key, data, mode=mode))
        return version_of(found)

    def remove_below(self, first: str = "/") -> None:
        """Delete all objects below this path, those whose names end in `first` before others, if the server can list
        them."""

        def call() -> None:
            found = [each["path"] for listed in self.store.list(self.key) for each in listed]
            found.sort(key=lambda name: not name.endswith(first))
            for start in range(0, len(found), _DELETED_AT_ONCE):
                self.store.delete(found[start : start + _DELETED_AT_ONCE])

        try:
            requested(self, OutputError, call)
        except (OutputError, FileNotFoundError):
            if self.lists:
                raise


def requested(path: ObjectPath, kind: type[MillraceError], call: Callable[[], T]) -> T:
    """What the call returns; its errors as `ObjectPath` has them. `kind`: for what the user can correct."""
    try:
        import obstore.exceptions as theirs
    except ImportError as error:
        raise _missing(path) from error
    try:
        tried = partial(_repeated, path, call, theirs.BaseError)
        return _interruptible(tried) if kind is InputError else tried()
    except FileNotFoundError as error:
        if _found(_CODE, error) in _NO_BUCKET:
            raise failure(path, kind, error) from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except (theirs.AlreadyExistsError, theirs.PreconditionError) as error:
        raise ChangedError(str(path)) from error
    except (theirs.BaseError, OSError) as error:
        raise failure(path, kind, error) from error


def _repeated(path: ObjectPath, call: Callable[[], T], fault: type[Exception]) -> T:
    """What the call returns. obstore repeats a request `_RETRIES` times, which takes a few seconds: enough for a wrong
    certificate or address, but not for a server that is busy, or has answered before."""
    place, until = (path.scheme, path.bucket), time.monotonic() + RETRY_S
    while True:
        try:
            done = call()
            _answered.add(place)
            return done
        except fault as error:
            is_repeated = f"after {_RETRIES} retries" in str(error)
            if not is_repeated or _found(_STATUS, error) is not None:
                _answered.add(place)
            is_over = not is_repeated or place not in _answered or time.monotonic() > until
            if is_over or _found(_UNTRUSTED, error) is not None:
                raise


def _interruptible(call: Callable[[], T]) -> T:
    """What the call returns. In the main thread, a signal need not wait for its end."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()


def failure(path: ObjectPath, kind: type[MillraceError], error: BaseException) -> Exception:
    """What an error of obstore becomes."""
    import obstore.exceptions as theirs

    text = str(error)
    code, status = _found(_CODE, error), _found(_STATUS, error)
    reason = ", ".join(filter(None, (status and status.strip(), code)))
    names = _CREDENTIALS.get(path.scheme)
    if code in _NO_BUCKET:
        return kind(f"{path}: there is no bucket {path.bucket} ({code}); check its name, the region and the endpoint")
    if code in _EXPIRED:
        return StorageError(f"{path}: the credentials have expired ({code}); renew them, then run again")
    if (status or "").startswith("416"):
        return ValueError("it is shorter than its metadata say")
    refused = isinstance(error, theirs.PermissionDeniedError | theirs.UnauthenticatedError)
    if refused or (status or "").startswith(_DENIED):
        way_out = f"check {names}, and what they may do" if names else "the server needs a permission"
        return kind(f"{path}: access is denied ({reason or type(error).__name__}); {way_out}")
    untrusted = _found(_UNTRUSTED, error)
    if untrusted is not None:
        way_out = "if an authority of your own signed it, set SSL_CERT_FILE to that authority's certificate"
        return kind(f"{path}: the server's certificate is not trusted ({untrusted}); {way_out}")
    if any(host in text for host in _IMDS):
        anonymous = ", or AWS_SKIP_SIGNATURE=true for a public bucket" if path.scheme == "s3" else ""
        return kind(f"{path}: no credentials were found; set {names}{anonymous}")
    if "Range request not supported" in text:
        return kind(f"{path}: the server sends whole files only, and Millrace reads parts; download the file first")
    is_refusal = (status or "").startswith("4") and not (status or "").startswith(_TRY_LATER)
    if isinstance(error, theirs.NotSupportedError) or is_refusal:
        return kind(f"{path}: the server refuses the request ({reason or _first_line(text)}); check the URL")
    broken = _found(_CAUSE, error) or _found(_HTTP_ERROR, error)
    said = reason or broken or _first_line(text)
    way_out = "check the network and the endpoint, then run again"
    return StorageError(f"{path}: the object store does not answer as it should ({said}); {way_out}")


def _found(pattern: re.Pattern[str], error: BaseException) -> str | None:
    found = pattern.search(str(error))
    return found[1] if found else None


def _first_line(text: str) -> str:
    return re.sub(r"https?://\S+", "…", text.partition("\n")[0])[:160]


_answered: set[tuple[str, str]] = set()  # schemes and buckets
_stores: dict[tuple[int, str, str], Any] = {}  # by process: connections do not survive a fork


def _store(path: ObjectPath) -> Any:
    place = os.getpid(), path.scheme, path.bucket
    found = _stores.get(place)
    return _stores.setdefault(place, _opened(path)) if found is None else found


def _missing(path: ObjectPath) -> InputError:
    return InputError(f"{path}: object stores need the package obstore; install it: {INSTALL}")


def _opened(path: ObjectPath, prefix: str = "") -> Any:
    try:
        from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store
    except ImportError as error:
        raise _missing(path) from error
    for name, value in os.environ.items():
        if _ENDPOINT_URLS.fullmatch(name) and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
            raise InputError(f"{name}={value}: must be a URL, such as https://HOST:PORT")
    plain = path.scheme == "http" or any(
        _ENDPOINTS.fullmatch(name) and ("http://" in value or "EMULATOR" in name) for name, value in os.environ.items()
    )
    options: Any = {
        "client_options": {
            "timeout": timedelta(seconds=REQUEST_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "allow_http": plain,
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_S),
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        },
    }
    makers: dict[str, Callable[[], Any]] = {
        "s3": lambda: S3Store(path.bucket, prefix=prefix or None, **options),
        "gs": lambda: GCSStore(path.bucket, prefix=prefix or None, **options),
        "az": lambda: AzureStore(path.bucket, prefix=prefix or None, **options),
    }
    host = f"{path.scheme}://{path.bucket}/{quote(prefix)}"
    make = makers.get(path.scheme, lambda: HTTPStore.from_url(host, **options))
    try:
        return make()
    except Exception as error:  # obstore's error, or that of a setting's value
        raise InputError(f"{path}: its store cannot be opened: {_first_line(str(error))}") from error

"""The Python client of a service.

from pipeline import Client

job = Client("http://gpu-node:8765", token="…").submit("smooth", "scan.tif", "smooth.tif", size=9)
job.wait(progress=True)
print(job.receipt["wall_seconds"])
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import httpx2

from pipeline.answers import Event, MalformedEvent, checked, expected, json_of, lines_of, parsed, without_password
from pipeline.api_models import (
    TERMINAL,
    Accepted,
    Estimate,
    EventView,
    JobPage,
    JobView,
    State,
    WorkerView,
    WorkloadView,
)
from pipeline.config import parse_bytes, parse_seconds, whole
from pipeline.errors import (
    DISK_FAULTS,
    MillraceError,
    OutputError,
    ServiceError,
    ServiceRefused,
    StorageError,
    printable,
)
from pipeline.notebook import in_notebook, job_html, shown
from pipeline.storage import archive

DEFAULT_URL = "http://127.0.0.1:8765"
RETRIED = (State.FAILED, State.CANCELLED)
# A request without an answer is sent again: each carries a key, so that it cannot create two jobs.
TRIES = 4
FIRST_PAUSE_S = 0.25
PIECE_BYTES = 1 << 20
# Jobs in one answer: listing that many takes a seventh of a second.
MOST_LISTED = 10_000
# The service sends at least a comment every 15 s.
MOST_SILENCE_S = 60.0
# Waiting for a job survives a restart of the service, but not a longer outage.
MOST_OUTAGE_S = 120.0
# Never reached through a proxy, which would connect to itself.
_LOOPBACKS = ("127.0.0.1", "[::1]", "localhost")
# Where httpx finds proxies and certificates.
_ENVIRONMENT = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"


class Client:
    """A connection to a service; use it as a context manager, or call `close`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """url     : default MILLRACE_URL, or this machine's service
        token   : default MILLRACE_TOKEN; a service on loopback may need none
        ca_file : PEM file of the only authority that may vouch for an https:// service; default MILLRACE_CA_FILE, or
                  those of the system
        """
        self.url = (url or os.environ.get("MILLRACE_URL") or DEFAULT_URL).rstrip("/")
        self._address = without_password(self.url)
        token = token or os.environ.get("MILLRACE_TOKEN")
        if token is not None and not re.fullmatch("[!-~]*", token):
            raise ServiceRefused("MILLRACE_TOKEN: is not a token; `millrace token create NAME` makes one")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            if not re.fullmatch(r"(?i:https?)://[^\s/?#]+(/[^\s?#]*)?", self.url):
                raise ValueError(self.url)
            if (httpx2.URL(self.url).port or 0) > 65_535:  # a socket would take it modulo 65,536
                raise ValueError(self.url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ServiceRefused(f"{self._address}: is not a service's URL; write it like {DEFAULT_URL}") from error
        try:
            itself = dict.fromkeys(f"all://{host}" for host in _LOOPBACKS)
            self._http = httpx2.Client(
                base_url=self.url, headers=headers, timeout=timeout_s, mounts=itself,
                verify=_trusting(ca_file or os.environ.get("MILLRACE_CA_FILE")),
            )  # fmt: skip
        except (httpx2.InvalidURL, ValueError, ImportError, OSError) as error:
            raise ServiceRefused(f"the environment is wrong ({error}); correct or unset {_ENVIRONMENT}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(
        self,
        workload: str,
        input: str | os.PathLike[str],  # noqa: A002 - the API's name
        output: str | os.PathLike[str],
        *,
        priority: int = 0,
        after: Sequence[Job | str] = (),
        group: str | None = None,
        after_any: Sequence[Job | str] = (),
        limits: Mapping[str, Any] | None = None,
        no_clobber: bool = False,
        webhook: str | None = None,
        key: str | None = None,
        **parameters: Any,
    ) -> Job:
        """Submit a job: it is on the service's disk when this returns.

        after      : jobs that have to succeed first
        after_any  : jobs that have to end first, however they do
        limits     : what it may take: time ("2h" or seconds), memory and gpu_memory ("16GiB" or bytes), gpus
        no_clobber : the job is refused, or fails, if its output exists
        webhook    : an address to notify when the job ends, at one of the hosts that the service allows
        group      : one of your groups, whose users see the job; default: your first
        key        : an idempotency key; by default a new one, which covers only this call's own repetitions
        parameters : of the workload

        Raises ServiceRefused if the service refuses the job, ServiceError if it does not answer.
        """
        how = {
            "priority": priority, "after": after, "after_any": after_any, "group": group, "limits": limits,
            "no_clobber": no_clobber, "webhook": webhook,
        }  # fmt: skip
        return self._submit(workload, input, output, how, key, parameters, None)[0]

    def submit_array(
        self,
        workload: str,
        input: str,  # noqa: A002
        output: str,
        array: str,
        *,
        priority: int = 0,
        after: Sequence[Job | str] = (),
        group: str | None = None,
        after_any: Sequence[Job | str] = (),
        limits: Mapping[str, Any] | None = None,
        no_clobber: bool = False,
        webhook: str | None = None,
        key: str | None = None,
        **parameters: Any,
    ) -> list[Job]:
        """Submit one job for each number of the range `array`, such as "0-99", or "0-99%4" for at most four at the same
        time; {index} in paths is replaced by the number. The rest is as for `submit`."""
        how = {
            "priority": priority, "after": after, "after_any": after_any, "group": group, "limits": limits,
            "no_clobber": no_clobber, "webhook": webhook,
        }  # fmt: skip
        return self._submit(workload, input, output, how, key, parameters, array)

    def _submit(
        self, workload: str, source: Any, output: Any, how: Mapping[str, Any], key: str | None,
        parameters: Mapping[str, Any], array: str | None,
    ) -> list[Job]:  # fmt: skip
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ServiceRefused(f"key {key!r}: an idempotency key needs one or more characters, all printable ASCII")
        body = {
            "workload": workload, "input": os.fspath(source), "output": os.fspath(output),
            "parameters": as_json(parameters), "array": array, **how,
            **{name: [getattr(each, "id", each) for each in how[name]] for name in ("after", "after_any")},
            "limits": job_limits(how["limits"] or {}),
        }  # fmt: skip
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        answer = expected(Accepted, self.request("POST", "/v1/jobs", json=body, headers=headers))
        return [Job(self, found) for found in answer["jobs"]]

    def job(self, job: str) -> Job:
        """The job with this id. ServiceRefused if there is none."""
        if re.fullmatch("[0-9a-f]{12}", job) is None:
            raise ServiceRefused(
                f"there is no job {job}: an id has 12 hexadecimal digits, as `millrace jobs` lists them"
            )
        return Job(self, self.request("GET", f"/v1/jobs/{job}"))

    def jobs(self, *, limit: int | None = None, **filters: Any) -> Iterator[Job]:
        """Jobs, the newest first. filters: state, owner, group, workload, array."""
        asked = {name: value for name, value in filters.items() if value is not None}
        left, before = limit, None
        while left is None or left > 0:
            size = MOST_LISTED if left is None else min(left, MOST_LISTED)
            params = asked | {"limit": size} | ({"before": before} if before else {})
            page = expected(JobPage, self.request("GET", "/v1/jobs", params=params))
            yield from (Job(self, found) for found in page["jobs"])
            before, left = page["next"], None if left is None else left - size
            if before is None:
                return

    def workloads(self) -> list[dict[str, Any]]:
        """The workloads, each with the schema of its parameters."""
        found: list[dict[str, Any]] = expected(list[WorkloadView], self.request("GET", "/v1/workloads"))
        return found

    def workers(self) -> list[dict[str, Any]]:
        """The service's workers."""
        found: list[dict[str, Any]] = expected(list[WorkerView], self.request("GET", "/v1/workers"))
        return found

    def request(self, method: str, path: str, *, done: Callable[[], Any] = lambda: None, **options: Any) -> Any:
        """The answer's JSON. A request without an answer is sent again, up to TRIES times.

        done : called if a repeated request is refused because of the job's state: returns an answer in place of the
               lost one if the service had acted on an earlier try, else None
        """
        pause = FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            try:
                response = self._http.request(method, path, **options)
            except UnicodeError as error:
                # Since Python 3.13 the idna codec raises UnicodeEncodeError too.
                if not isinstance(error, UnicodeEncodeError) or error.encoding == "idna":
                    raise ServiceRefused(f"{self._address}: is not a host name; write it like {DEFAULT_URL}") from error
                fault = error.object[max(error.start - 40, 0) : error.end + 40]
                raise ServiceRefused(f"{fault!a}: cannot be sent as text; write it otherwise") from error
            except httpx2.RequestError as error:
                if left == 0:
                    raise self._unreachable(error) from error
            else:
                if response.status_code == 409 and left < TRIES - 1 and (found := done()) is not None:
                    return found
                if response.status_code != 503 or left == 0:
                    return json_of(checked(response))
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def stream(self, path: str, *, silence_s: float = MOST_SILENCE_S, **headers: str) -> Any:
        """A context with the unread answer; fails if nothing arrives for `silence_s`."""
        return self._http.stream("GET", path, headers=headers, timeout=httpx2.Timeout(30.0, read=silence_s))

    def _unreachable(self, error: Exception) -> ServiceError:
        way_out = "start one with `millrace serve`, or set MILLRACE_URL"
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            way_out = (
                "set MILLRACE_CA_FILE to the certificate of the authority that signed its own, or correct MILLRACE_URL"
            )
        return ServiceError(f"{self._address}: no service answers ({error or type(error).__name__}); {way_out}")


def _trusting(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext | bool:
    """What vouches for a service. ServiceRefused if the file cannot be used."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        said = "is not a PEM certificate" if isinstance(error, ssl.SSLError | ValueError) else error.strerror
        raise ServiceRefused(
            f"MILLRACE_CA_FILE {os.fspath(ca_file)}: {said}; name the authority's certificate"
        ) from error


class Job:
    """A job as of the last request. `view` has the fields of `JobView`."""

    view: dict[str, Any]

    def __init__(self, client: Client, view: Any) -> None:
        self._client = client
        self._seen(view)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state}: {self.view['workload']} {self.view['input']} → {self.view['output']}>"

    def _repr_html_(self) -> str:
        """For notebooks: the state, a bar while the job runs, and the preview of its result."""
        return job_html(self.view, self._preview() if self.state == State.SUCCEEDED else None)

    def _preview(self) -> bytes | None:
        """PNG; None if it is not drawn yet, or does not come."""
        if self._client._http.is_closed:
            return None
        with suppress(httpx2.RequestError), self._client.stream(f"/v1/jobs/{self.id}/preview") as response:
            return bytes(response.read()) if response.status_code == 200 else None
        return None

    @property
    def id(self) -> str:
        return str(self.view["id"])

    @property
    def state(self) -> str:
        return str(self.view["state"])

    @property
    def error(self) -> str | None:
        """Why the job failed, if it did."""
        error: str | None = self.view["error"]
        return error

    @property
    def receipt(self) -> dict[str, Any]:
        """The receipt. Raises ServiceRefused if the job has not succeeded."""
        found: dict[str, Any] = expected(dict[str, Any], self._client.request("GET", f"/v1/jobs/{self.id}/receipt"))
        return found

    def estimate(self) -> dict[str, Any]:
        """What the job will take, by its plan: the fields of `Estimate`. The service plans it for this, if need be.

        Raises ServiceRefused if it cannot be planned yet.
        """
        found: dict[str, Any] = expected(Estimate, self._client.request("GET", f"/v1/jobs/{self.id}/estimate"))
        return found

    def refresh(self) -> Self:
        return self._seen(self._client.request("GET", f"/v1/jobs/{self.id}"))

    def _seen(self, view: Any) -> Self:
        self.view = expected(JobView, view)
        return self

    def cancel(self) -> Self:
        """Cancel the job and remove its partial output."""
        return self._seen(self._client.request("POST", f"/v1/jobs/{self.id}/cancel"))

    def retry(self) -> Self:
        """Queue a failed or cancelled job again; finished chunks are kept."""

        def queued_again() -> Any:
            """The job, if it is no longer failed or cancelled: only a retry changes that."""
            view = expected(JobView, self._client.request("GET", f"/v1/jobs/{self.id}"))
            return view if self.state in RETRIED and view["state"] not in RETRIED else None

        return self._seen(self._client.request("POST", f"/v1/jobs/{self.id}/retry", done=queued_again))

    def log(self, after: int = 0) -> list[dict[str, Any]]:
        """The events so far."""
        found: list[dict[str, Any]] = []
        path = f"/v1/jobs/{self.id}/log"
        while page := expected(list[EventView], self._client.request("GET", path, params={"after": after})):
            found.extend(page)
            after = page[-1]["number"]
        return found

    def events(self, after: int = 0, *, timeout_s: float | None = None) -> Iterator[Event]:
        """Events as they happen, until the job is over. A broken connection is restored for up to two minutes.

        Raises TimeoutError if the job is not over in time; it continues. ServiceError if the service stays away, or
        another program answers.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        lost_at = None
        while True:
            left = MOST_SILENCE_S if end is None else min(max(end - time.monotonic(), 0.05), MOST_SILENCE_S)
            path, headers = f"/v1/jobs/{self.id}/events", {"Last-Event-ID": str(after)}
            try:
                with self._client.stream(path, silence_s=left, **headers) as response:
                    checked(response)
                    for event in parsed(lines_of(response.iter_bytes())):
                        after, lost_at = event.number or after, None
                        yield event
                        if event.data.get("state") not in TERMINAL:
                            self._is_over_late(end, timeout_s)  # after yielding what has happened so far
                if self.refresh().state in TERMINAL:
                    return
                if self._is_over_late(end, timeout_s):  # a proxy may end the stream though the job is not over
                    return
                time.sleep(FIRST_PAUSE_S)
            except MalformedEvent:
                raise
            except (httpx2.RequestError, ServiceError) as error:
                if self._is_over_late(end, timeout_s):
                    return
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > MOST_OUTAGE_S:
                    raise self._client._unreachable(error) from error
                time.sleep(FIRST_PAUSE_S)

    def _is_over_late(self, end: float | None, timeout_s: float | None) -> bool:
        """Whether time has run out and the job is over. TimeoutError if it is not, or the service does not answer."""
        if end is None or time.monotonic() <= end:
            return False
        with suppress(MillraceError):
            if self.refresh().state in TERMINAL:
                return True
        raise TimeoutError(f"job {self.id} is {self.state} after {timeout_s:g} s")

    def wait(self, *, progress: bool = False, timeout_s: float | None = None) -> Self:
        """Returns when the job is over, whatever its `state`.

        progress : show a bar on stderr, or in a notebook the job itself

        Raises TimeoutError if it is not over in time. The job continues.
        """
        title = printable(Path(self.view["output"]).name)
        inline = progress and in_notebook()
        bar = shown(self) if inline else _bar(title) if progress and sys.stderr.isatty() else nullcontext()
        with bar as show:
            for event in self.events(timeout_s=timeout_s):
                if show is not None and event.kind == "progress":
                    show(event.data)
        return self  # refreshed at the end of its events

    def result(self, path: str | os.PathLike[str]) -> Path:
        """Download the output to a file or folder, whole or not at all; an older file is replaced.

        Raises OutputError if `path` cannot be written, or exists and the output is a folder, StorageError if the disk
        fails.
        """
        target = Path(path)
        final = Path(os.path.realpath(target))  # keep a link
        # Not OUTPUT.partial: that may belong to a run to be resumed.
        partial = final.with_name(f".millrace-{secrets.token_hex(8)}.partial")
        try:
            if target.exists() and not target.is_file():
                raise OutputError(f"{target}: exists and is not a file; name another place")
            with self._client.stream(f"/v1/jobs/{self.id}/result") as response:
                checked(response)
                if response.headers.get("content-type") == archive.MEDIA_TYPE:
                    if target.exists():
                        raise OutputError(f"{target}: exists, and the result is a folder; name another place")
                    archive.unpack(response.iter_bytes(), partial)
                else:
                    with partial.open("wb") as file:
                        for piece in response.iter_bytes(PIECE_BYTES):
                            file.write(piece)
            partial.replace(final)
        except httpx2.RequestError as error:
            raise self._client._unreachable(error) from error
        except OSError as error:
            kind = StorageError if error.errno in DISK_FAULTS else OutputError
            raise kind(f"{target}: {error.strerror}; choose another place") from error
        finally:
            with suppress(OSError):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        return target


def job_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Limits for a request. Raises ServiceRefused if one is not a time, an amount of memory or a number."""
    fields: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "time": ("time_s", parse_seconds), "memory": ("memory_bytes", parse_bytes),
        "gpu_memory": ("gpu_memory_bytes", parse_bytes), "gpus": ("gpus", whole),
    }  # fmt: skip
    found = {}
    for name, value in limits.items():
        if name not in fields:
            raise ServiceRefused(f"limits: there is no {name!r}; there are {', '.join(fields)}")
        field, parse = fields[name]
        try:
            found[field] = parse(value)
        except ValueError as error:
            raise ServiceRefused(f"limits, {name}: {error}") from error
    return found


def as_json(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for a request, NaN and infinities as text. Raises ServiceRefused if one is not JSON."""
    sent = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in parameters.items()
    }
    for name, value in sent.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ServiceRefused(f"parameters.{name}: {error}; give a number, a text or a list of them") from error
    return sent


@contextmanager
def _bar(title: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar; call what this yields with the data of each `progress` event."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(stderr=True)
    name = Column(no_wrap=True, max_width=console.width // 3)  # leave room for the other columns
    columns = (
        TextColumn("{task.description}", markup=False, table_column=name), BarColumn(), MofNCompleteColumn(),
        TextColumn("chunks,"), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, state="queued")

        def show(data: Mapping[str, Any]) -> None:
            progress.update(task, completed=data["chunks_done"], total=data["chunks"], state=data["state"])

        yield show

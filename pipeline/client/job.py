"""A job of a service, as its client sees it."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import httpx2

from pipeline.api_models import TERMINAL, Estimate, EventView, JobView, State
from pipeline.client.answers import Event, ForeignAnswer, checked, expected, lines_of, parsed
from pipeline.client.connection import MOST_SILENCE_S, Connection
from pipeline.client.display import bar, in_notebook, job_html, shown
from pipeline.errors import DISK_FAULTS, MillraceError, OutputError, ServiceError, StorageError, printable
from pipeline.storage import archive

RETRIED = (State.FAILED, State.CANCELLED)
PIECE_BYTES = 1 << 20
RECONNECT_S = 0.25
MOST_DRAWING_S = 5.0
# Waiting for a job survives a restart of the service, but not a longer outage.
MOST_OUTAGE_S = 120.0


class Job:
    """A job as of the last request. `view` has the fields of `JobView`."""

    view: dict[str, Any]

    def __init__(self, connection: Connection, view: Any) -> None:
        self._connection = connection
        self._seen(view)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state}: {self.view['workload']} {self.view['input']} → {self.view['output']}>"

    def _repr_html_(self) -> str:
        """For notebooks: the state, a bar while the job runs, and the preview of its result."""
        return job_html(self.view, self._preview() if self.state == State.SUCCEEDED else None)

    def _preview(self) -> bytes | None:
        """PNG; None if it is not drawn yet, or does not come."""
        if self._connection.is_closed:
            return None
        with suppress(httpx2.RequestError), self._connection.stream(f"/v1/jobs/{self.id}/preview") as response:
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
        found: dict[str, Any] = expected(dict[str, Any], self._connection.request("GET", f"/v1/jobs/{self.id}/receipt"))
        return found

    def estimate(self) -> dict[str, Any]:
        """What the job will take, by its plan: the fields of `Estimate`. The service plans it for this, if need be.

        Raises ServiceRefused if it cannot be planned yet.
        """
        found: dict[str, Any] = expected(Estimate, self._connection.request("GET", f"/v1/jobs/{self.id}/estimate"))
        return found

    def refresh(self) -> Self:
        return self._seen(self._connection.request("GET", f"/v1/jobs/{self.id}"))

    def _seen(self, view: Any) -> Self:
        self.view = expected(JobView, view)
        return self

    def cancel(self) -> Self:
        """Cancel the job and remove its partial output."""
        return self._seen(self._connection.request("POST", f"/v1/jobs/{self.id}/cancel"))

    def retry(self) -> Self:
        """Queue a failed or cancelled job again; finished chunks are kept."""

        def queued_again() -> Any:
            """The job, if it is no longer failed or cancelled: only a retry changes that."""
            view = expected(JobView, self._connection.request("GET", f"/v1/jobs/{self.id}"))
            return view if self.state in RETRIED and view["state"] not in RETRIED else None

        return self._seen(self._connection.request("POST", f"/v1/jobs/{self.id}/retry", done=queued_again))

    def log(self, after: int = 0) -> list[dict[str, Any]]:
        """The events so far."""
        found: list[dict[str, Any]] = []
        path = f"/v1/jobs/{self.id}/log"
        while page := expected(list[EventView], self._connection.request("GET", path, params={"after": after})):
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
                with self._connection.stream(path, silence_s=left, **headers) as response:
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
                time.sleep(RECONNECT_S)
            except ForeignAnswer:
                raise
            except (httpx2.RequestError, ServiceError) as error:
                if self._is_over_late(end, timeout_s):
                    return
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > MOST_OUTAGE_S:
                    raise self._connection.unreachable(error) from error
                time.sleep(RECONNECT_S)

    def _is_over_late(self, end: float | None, timeout_s: float | None) -> bool:
        """Whether time has run out and the job is over. TimeoutError if it is not, or the service does not answer."""
        if end is None or time.monotonic() <= end:
            return False
        with suppress(MillraceError):
            if self.refresh().state in TERMINAL:
                return True
        raise TimeoutError(f"job {self.id} is {self.state} after {timeout_s:g} s")

    def wait(self, *, progress: bool = False, timeout_s: float | None = None) -> Self:
        """Returns when the job has ended in any `state`.

        progress : show a bar on stderr, or in a notebook the job itself

        Raises TimeoutError if it is not over in time. The job continues.
        """
        title = printable(Path(self.view["output"]).name)
        inline = progress and in_notebook()
        display = shown(self) if inline else bar(title) if progress and sys.stderr.isatty() else nullcontext()
        with display as show:
            for event in self.events(timeout_s=timeout_s):
                if show is not None and event.kind == "progress":
                    show(event.data)
            if inline:
                self._await_preview()
        return self  # refreshed at the end of its events

    def _await_preview(self) -> None:
        """A preview is drawn after the job is done: a notebook that is run as a whole would show none."""
        end = time.monotonic() + MOST_DRAWING_S
        while self.state == State.SUCCEEDED and self._preview() is None and time.monotonic() < end:
            time.sleep(RECONNECT_S)

    def result(self, path: str | os.PathLike[str]) -> Path:
        """Download the output to a file or folder, whole or not at all; an older file is replaced.

        Raises OutputError if `path` cannot be written, or exists and the output is a folder, StorageError if the disk
        fails.
        """
        target = Path(path)
        final = Path(os.path.realpath(target))  # keep a link
        # Not OUTPUT.partial: that may belong to a run to be resumed.
        partial = final.parent / f".millrace-{secrets.token_hex(8)}.partial"
        try:
            if target.exists() and not target.is_file():
                raise OutputError(f"{target}: exists and is not a file; name another place")
            with self._connection.stream(f"/v1/jobs/{self.id}/result") as response:
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
            raise self._connection.unreachable(error) from error
        except OSError as error:
            kind = StorageError if error.errno in DISK_FAULTS else OutputError
            raise kind(f"{target}: {error.strerror}; choose another place") from error
        finally:
            with suppress(OSError):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        return target

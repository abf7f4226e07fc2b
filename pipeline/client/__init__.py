"""The Python client of a service.

from pipeline import Client

job = Client("http://gpu-node:8765", token="…").submit("smooth", "scan.tif", "smooth.tif", size=9)
job.wait(progress=True)
print(job.receipt["wall_seconds"])
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.api_models import Accepted, JobPage, WorkerView, WorkloadView
from pipeline.client.answers import ForeignAnswer, expected
from pipeline.client.connection import Connection
from pipeline.client.job import MOST_OUTAGE_S, Job
from pipeline.config import parse_bytes, parse_seconds, whole
from pipeline.errors import ServiceRefused

__all__ = ["MOST_OUTAGE_S", "Client", "ForeignAnswer", "Job"]

# Jobs in one answer: listing that many takes a seventh of a second.
MOST_LISTED = 10_000


class Client(Connection):
    """A connection to a service; use it as a context manager, or call `close`."""

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
        key: str | None = None,
        **options: Any,
    ) -> list[Job]:
        """Submit one job for each number of the range `array`, such as "0-99", or "0-99%4" for at most four at the same
        time; {index} in paths is replaced by the number.

        options : `priority`, `after` and so on, and the workload's parameters, all as for `submit`
        """
        how = {name: options.pop(name, default) for name, default in _HOW.items()}
        return self._submit(workload, input, output, how, key, options, array)

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


# Options of `submit` for how a job is run, and their defaults.
_HOW: Mapping[str, Any] = {
    name: each.default
    for name, each in inspect.signature(Client.submit).parameters.items()
    if each.kind is each.KEYWORD_ONLY and name != "key"
}


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

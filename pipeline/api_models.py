"""Answers of the HTTP API: the server builds them, the client validates them, OpenAPI describes them.

A client ignores unknown fields, so that a newer service can add some.
"""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# A worker whose last heartbeat is older is shown as silent.
SILENT_S = 5.0


class State(StrEnum):
    QUEUED = "queued"
    PLANNING = "planning"
    RUNNING = "running"
    PUBLISHING = "publishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def told(self) -> str:
        """As what a job does or is."""
        return f"{'has' if self in (State.SUCCEEDED, State.FAILED) else 'is'} {self}"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


# Loading the program's own code and libraries takes up to 300 MB.
LEAST_MEMORY_BYTES = 256 << 20


class JobLimits(BaseModel):
    """What a job may take; null: no limit."""

    model_config = ConfigDict(frozen=True)

    time_s: float | None = Field(default=None, gt=0, le=1e8, description="seconds of all its runs together")
    memory_bytes: int | None = Field(
        default=None, ge=LEAST_MEMORY_BYTES, le=2**50,
        description="host memory on each host, above that of the idle workers; buffers take half of it at most",
    )  # fmt: skip
    gpu_memory_bytes: int | None = Field(default=None, ge=1 << 20, le=2**50, description="memory of each GPU")
    gpus: int | None = Field(
        default=None, ge=1, le=4096, description="number of GPUs (without GPUs: worker processes) that it runs on"
    )


NO_LIMITS = JobLimits()


class Estimate(BaseModel):
    """What a job will take, by its plan. `seconds`: at the rate of earlier jobs of its workload; null without any."""

    chunks: int
    read_bytes: int
    written_bytes: int
    memory_bytes: int
    seconds: float | None


class JobUse(BaseModel):
    """What a job has taken so far, in all its runs; null: not measured."""

    seconds: float
    memory_bytes: int | None
    gpu_memory_bytes: int | None


class JobView(BaseModel):
    """A job. Times are seconds since 1970, UTC."""

    id: str
    number: int
    owner: str
    group: str
    workload: str
    input: str
    output: str
    parameters: dict[str, Any]
    priority: int
    array: str | None
    index: int | None
    state: State
    cancelling: bool
    attempts: int
    chunks: int | None
    chunks_done: int
    error: str | None
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    device_seconds: float
    held: bool
    preemptions: int
    throttle: int | None = Field(description="how many jobs of its array may run at the same time")
    no_clobber: bool = Field(description="whether it fails rather than replace an older output")
    limits: JobLimits
    estimate: Estimate | None
    used: JobUse


class StageView(BaseModel):
    """What one stage of a run has done: `busy` is its share of the run's time, `rate` in bytes per second."""

    name: str
    bytes: int
    busy: float
    rate: float


class ProgressView(BaseModel):
    """How far a job has come. `seconds` and `stages` describe the current run; null and empty without one."""

    state: State
    chunks: int | None
    chunks_done: int
    seconds: float | None
    stages: list[StageView]


class JobPage(BaseModel):
    """Jobs, the newest first. Pass `next` as `before` to get the following page; null on the last."""

    jobs: list[JobView]
    next: int | None


class Accepted(BaseModel):
    """Jobs that are on disk now. `array`: the id of the array, if they are one."""

    array: str | None
    jobs: list[JobView]


class EventView(BaseModel):
    """Something that happened to a job: it changed its `state`, or a `log` line was written."""

    number: int
    at: float
    kind: str
    message: str


class HoldView(BaseModel):
    """Queued jobs of an owner, a group or everybody (`all`) wait until an operator releases them."""

    kind: str
    name: str
    held_by: str
    at: float


class QueueView(BaseModel):
    """The queue for operators: the holds, and how many jobs run and are queued."""

    holds: list[HoldView]
    running: int
    queued: int


class FileView(BaseModel):
    """A file or folder under the data roots. kind: folder, image (also a Zarr folder) or file; null: not known."""

    name: str
    path: str
    kind: str
    bytes: int | None
    modified_at: float | None


class FolderView(BaseModel):
    """A part of a folder's entries, by name. Pass `next` as `after` to get the following ones; null on the last page.

    path     : null for the list of data roots
    parent   : null for a data root
    left_out : entries of this part that cannot be used: they lead out of the data roots, or no longer exist
    """

    path: str | None
    parent: str | None
    entries: list[FileView]
    next: str | None
    left_out: int


class AxisView(BaseModel):
    """An axis of an image, a map or a series. step: the distance of its samples with the unit; null: not known."""

    letter: str
    length: int
    step: str | None


class ImageView(BaseModel):
    """An image, a map or a series of images.

    axes     : all but the colours of a pixel, the slowest first
    plane    : the letters of the rows and columns that are shown unless others are chosen
    at       : the index along each other axis that is shown first
    dtype    : NumPy's name; of complex samples, the magnitude is shown unless another part is chosen
    samples  : of a pixel, 1 for gray
    levels   : of the pyramid, the image itself included
    channels : names along the axis C, as far as they are known
    colours  : of the channels that a composite shows together, as RRGGBB; empty if it cannot be shown as one
    """

    path: str
    axes: list[AxisView]
    plane: str
    at: dict[str, int]
    dtype: str
    samples: int
    levels: int
    channels: list[str]
    colours: list[str]


class CancelledView(BaseModel):
    """Jobs that were cancelled. `more`: whether there are others of the same kind."""

    jobs: list[str]
    more: bool


class CapView(BaseModel):
    """A limit. kind: owner or group; the name "" stands for each one without a limit of its own."""

    kind: str
    name: str
    what: str  # running, unfinished, or a quota
    value: float


class UsageView(BaseModel):
    """What an owner used in a group. A run counts its seconds for every device that it could use."""

    day: date | None
    owner: str
    group: str
    device_seconds: float
    gpu_seconds: float
    read_bytes: int
    written_bytes: int
    runs: int
    succeeded: int
    failed: int
    cancelled: int


class WorkerView(BaseModel):
    """What jobs run on: a device and the process that owns it. Unknown values are null; there may be further fields."""

    model_config = ConfigDict(extra="allow")

    name: str
    model: str | None = None
    host: str | None = None
    heartbeat_age_s: float | None = Field(None, description="seconds since its last heartbeat, to about two seconds")
    load: float | None = Field(None, description="how busy it is, 0 to 1")
    memory_used_bytes: int | None = Field(None, description="of the GPU; on the CPU, of the worker's process")
    memory_total_bytes: int | None = Field(None, description="of the GPU; on the CPU, of the host")


class WorkloadView(BaseModel):
    """A kind of job, with the JSON schema of its parameters."""

    name: str
    summary: str
    parameters: dict[str, Any]

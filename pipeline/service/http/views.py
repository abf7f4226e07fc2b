"""The body of a submission, and functions that build the answers of `pipeline.api_models`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from pipeline.api_models import SILENT_S, JobLimits, JobView, ProgressView, StageView
from pipeline.engine.stages import STAGES, StageTotals
from pipeline.service.jobs import ACTIVE
from pipeline.service.running.run import UnderWay
from pipeline.service.store import MOST_OF_AN_ARRAY, NewJob, StoredJob

# Of all jobs of one request: storing them takes a second, and other jobs wait meanwhile.
MOST_DEPENDENCIES = 100_000
# Jobs cannot run if every worker's last heartbeat is older.
LOST_S = 20.0
INDEX = "{index}"
_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?:%([0-9]{1,5}))?")
JobId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$", examples=["5f0c2b9a1d3e"])]
Path_ = Annotated[str, Field(pattern=r"\S", max_length=4096, examples=["scan.tif"])]


def _reject_bool(value: Any) -> Any:
    """Refuses true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _true_json(parameters: dict[str, Any]) -> dict[str, Any]:
    """Refuses NaN, Infinity and lone surrogates: Python's parser accepts them, other readers of the job do not."""
    try:
        json.dumps(parameters, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds {error.object[error.start]!a}, which is a lone surrogate") from error
    except ValueError as error:
        raise ValueError('holds NaN or Infinity, which are not JSON; write them as text, such as "nan"') from error
    except RecursionError as error:
        raise ValueError("are nested too deeply") from error
    return parameters


class AskedLimits(JobLimits):
    """What a job asks to be limited to; the service's defaults and caps hold for the rest."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bools(cls, value: Any) -> Any:
        return _reject_bool(value)


NOTHING_ASKED = AskedLimits()


class Submission(BaseModel):
    """A job, or with `array` one job for each number of the range."""

    model_config = ConfigDict(extra="forbid")

    workload: str = Field(max_length=64, examples=["smooth"])
    input: Path_ = Field(description="a path under the data roots; in an array {index} becomes the number")
    output: Path_ = Field(
        description="a path under the data roots; must contain {index} in an array",
        examples=["smooth.tif", "smooth-{index}.tif"],
    )
    parameters: Annotated[dict[str, Any], AfterValidator(_true_json)] = Field(
        {}, description="as `GET /v1/workloads` describes them"
    )
    priority: Annotated[int, BeforeValidator(_reject_bool)] = Field(
        0, ge=-100, le=100, description="higher runs first; above 0 for operators only"
    )
    after: list[JobId] = Field([], max_length=1000, description="jobs that have to succeed first")
    after_any: list[JobId] = Field([], max_length=1000, description="jobs that have to end first, however they do")
    array: str | None = Field(
        None, pattern=r"^[0-9]{1,9}-[0-9]{1,9}(%[1-9][0-9]{0,4})?$", examples=["1-3", "0-999%20"],
        description="FROM-TO, or FROM-TO%N: at most N of them run at the same time",
    )  # fmt: skip
    no_clobber: bool = Field(
        False, description="keep an older output: the job is refused, or fails, if its output exists"
    )
    limits: AskedLimits = NOTHING_ASKED
    webhook: str | None = Field(
        None, max_length=1000, examples=["https://hooks.example.org/millrace"],
        description="an address to notify when the job ends, at one of the hosts that the service allows",
    )  # fmt: skip
    group: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._@-]{0,64}$",
        description="one of your groups, whose users see the job; by default your first",
    )

    @model_validator(mode="after")
    def _fits_an_array(self) -> Self:
        numbers = self.numbers()
        if numbers is not None and not 1 <= len(numbers) <= MOST_OF_AN_ARRAY:
            raise ValueError(f"array {self.array} has {len(numbers)} jobs; 1 to {MOST_OF_AN_ARRAY} are allowed")
        befores = len(self.after) + len(self.after_any)
        if numbers is not None and len(numbers) * befores > MOST_DEPENDENCIES:
            raise ValueError(
                f"{len(numbers):,} jobs that come after {befores:,} each are more than {MOST_DEPENDENCIES:,} "
                "dependencies; submit smaller arrays"
            )
        if numbers is not None and INDEX not in self.output:
            raise ValueError(f"output must contain {INDEX}: otherwise all jobs of the array would write one file")
        return self

    def numbers(self) -> range | None:
        if self.array is None:
            return None
        found = _RANGE.fullmatch(self.array)
        assert found is not None, "the pattern has been checked"
        return range(int(found[1]), int(found[2]) + 1)

    @property
    def throttle(self) -> int | None:
        """How many jobs of the array may run at the same time."""
        found = _RANGE.fullmatch(self.array or "")
        return None if found is None or found[3] is None else int(found[3])

    def jobs(self, owner: str, group: str, array_id: str) -> list[NewJob]:
        """The jobs to create."""
        numbers = self.numbers()
        if numbers is None:
            return [self._job(owner, group, None, None)]
        return [self._job(owner, group, array_id, number) for number in numbers]

    def _job(self, owner: str, group: str, array_id: str | None, number: int | None) -> NewJob:
        def filled(value: Any) -> Any:
            return value.replace(INDEX, str(number)) if isinstance(value, str) and number is not None else value

        return NewJob(
            owner=owner, group=group, workload=self.workload, input=filled(self.input), output=filled(self.output),
            parameters={name: filled(value) for name, value in self.parameters.items()}, priority=self.priority,
            after=frozenset(self.after), after_any=frozenset(self.after_any), array_id=array_id, array_index=number,
            throttle=self.throttle, limits=self.limits, webhook=self.webhook, no_clobber=self.no_clobber,
        )  # fmt: skip


def silent_workers(states: Sequence[Mapping[str, Any]], than_s: float = SILENT_S) -> list[str]:
    """One line for each worker whose last heartbeat is older."""
    return [
        f"{state['worker']}: last heartbeat {age_s:.0f} s ago"
        for state in states
        if (age_s := state.get("heartbeat_age_s") or 0.0) > than_s
    ]


def no_worker(states: Sequence[Mapping[str, Any]]) -> str | None:
    """Why no job can run; None if a worker can run one."""
    lost = silent_workers(states, LOST_S)
    if len(lost) < len(states):
        return None
    return "; ".join(("no worker sends heartbeats", *lost)) if lost else "there is no worker"


def job_view(stored: StoredJob) -> JobView:
    asked, job = stored.asked, stored.job
    return JobView(
        id=job.id, number=stored.number, owner=asked.owner, group=asked.group, workload=asked.workload,
        input=asked.input, output=asked.output, parameters=dict(asked.parameters), priority=asked.priority,
        array=asked.array_id, index=asked.array_index, state=job.state, cancelling=job.cancelling,
        attempts=job.attempts, chunks=job.chunks, chunks_done=job.chunks_done, error=job.error,
        submitted_at=stored.submitted_at, started_at=stored.started_at, finished_at=stored.finished_at,
        device_seconds=stored.device_seconds, held=stored.held,
        preemptions=job.preemptions, throttle=asked.throttle, no_clobber=asked.no_clobber, limits=asked.limits,
        estimate=stored.estimate, used=stored.used,
    )  # fmt: skip


def stage_views(stages: Mapping[str, StageTotals], wall_seconds: float) -> list[StageView]:
    """Every stage, in order; empty if no time has passed."""
    if wall_seconds <= 0:
        return []
    return [
        StageView(
            name=name, bytes=stages[name].nbytes, rate=stages[name].nbytes / wall_seconds,
            busy=min(stages[name].seconds / stages[name].lanes / wall_seconds, 1.0),
        )
        for name in STAGES
        if name in stages
    ]  # fmt: skip


def progress_view(stored: StoredJob, run: UnderWay | None) -> ProgressView:
    job = stored.job
    if run is None or job.state not in ACTIVE:
        return ProgressView(state=job.state, chunks=job.chunks, chunks_done=job.chunks_done, seconds=None, stages=[])
    done = min(max(run.chunks_done, job.chunks_done), job.chunks or 0)
    stages = stage_views(run.stages, run.seconds)
    return ProgressView(state=job.state, chunks=job.chunks, chunks_done=done, seconds=run.seconds, stages=stages)

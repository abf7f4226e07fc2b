"""The life of a job as a pure state machine: `handle` takes an event and returns the changed job and the actions to do.

No I/O, clock or thread in here. An event of a run carries the epoch of that run's claim: late events of an earlier run
are ignored, so that it can neither publish nor fail a job that another run has taken over.

    queued ─Claimed▶ planning ─Planned▶ running ─Computed▶ publishing ─Published▶ succeeded
       ▲                 │                 │                    │
       ├──LeaseLost──────┴─────────────────┴────────────────────┤   also Stopped for a drain, Preempted for a job of an
       │                                                        │   operator, and Failed and Died if another attempt
       │                                                        │   may help
       └─RetryRequested─ failed, cancelled ◀──Failed, Stopped───┘   Stopped after CancelRequested
    queued ─CancelRequested▶ cancelled                queued ─DependencyFailed▶ failed
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.api_models import State

# Claims of a job whose runs fail through no fault of its own.
MOST_ATTEMPTS = 3
# Deaths of a process that a job may have caused, until it finishes another chunk.
MOST_DEATHS = 3
# After so many preemptions a job runs to its end.
MOST_PREEMPTIONS = 3

ACTIVE = frozenset({State.PLANNING, State.RUNNING, State.PUBLISHING})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the state machine knows of a job."""

    id: str
    state: State = State.QUEUED
    epoch: int = 0  # of the newest claim; 0 before the first
    attempts: int = 0  # claims since it was submitted or retried, except those that ended with their server
    deaths: int = 0  # of processes that worked on it, since it last finished a chunk
    preemptions: int = 0  # since it was submitted or retried
    waiting_for: frozenset[str] = frozenset()  # jobs that have to succeed first
    waiting_for_end: frozenset[str] = frozenset()  # jobs that have to end first, however they do
    cancelling: bool = False  # the run has been asked to stop, for a cancellation
    chunks: int | None = None  # once planned
    chunks_done: int = 0
    error: str | None = None  # why it failed
    story: tuple[str, ...] = ()  # every event that changed the state, with the new state

    @property
    def claimable(self) -> bool:
        return self.state is State.QUEUED and not self.waiting_for and not self.waiting_for_end

    @property
    def preemptible(self) -> bool:
        """Whether a more urgent job may take its place."""
        return self.state is State.RUNNING and not self.cancelling and self.preemptions < MOST_PREEMPTIONS


# Events from outside


@dataclass(frozen=True)
class DependencySucceeded:
    """A job that this one waits for has succeeded."""

    job: str


@dataclass(frozen=True)
class DependencyFailed:
    """A job that this one waits for has failed or been cancelled."""

    job: str
    state: State


@dataclass(frozen=True)
class Claimed:
    """A runner takes the job, under an epoch above all earlier ones."""

    epoch: int


@dataclass(frozen=True)
class CancelRequested:
    """The user cancels the job."""


@dataclass(frozen=True)
class RetryRequested:
    """The user wants it again; finished chunks are kept. The sets: dependencies that it still waits for."""

    waiting_for: frozenset[str] = frozenset()
    waiting_for_end: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OfRun:
    """An event of the run under the claim of this epoch."""

    epoch: int


@dataclass(frozen=True)
class Planned(OfRun):
    chunks: int


@dataclass(frozen=True)
class Progressed(OfRun):
    """`chunks_done`: in this run and earlier ones, at least one of them in this run."""

    chunks_done: int


@dataclass(frozen=True)
class Recut(OfRun):
    """The chunks did not fit the device: the run starts again with smaller ones."""

    chunks: int


class Computed(OfRun):
    """Every chunk is written, and the audit has passed."""


class Published(OfRun):
    """The result has its final name."""


@dataclass(frozen=True)
class Failed(OfRun):
    """`transient`: another attempt may help: neither a user's mistake nor a wrong result."""

    error: str
    transient: bool


class Stopped(OfRun):
    """The run has ended on request: a cancellation, or a drain of the server."""


class Preempted(OfRun):
    """The run has ended in favour of a more urgent job; its finished chunks are kept."""


class LeaseLost(OfRun):
    """The runner did not renew its lease, or its process is gone."""


@dataclass(frozen=True)
class Died(OfRun):
    """A process that worked on the job has died, maybe because of it. `what`: the server, which was not killed from
    outside, or the job's own process."""

    what: str


Event = DependencySucceeded | DependencyFailed | Claimed | CancelRequested | RetryRequested | OfRun


# Actions


@dataclass(frozen=True)
class Start:
    """Plan the job and run it, under this epoch."""

    epoch: int


@dataclass(frozen=True)
class Stop:
    """Ask the run of this epoch to stop."""

    epoch: int


@dataclass(frozen=True)
class Discard:
    """Remove the partial output and the ledger: no run will continue them."""


@dataclass(frozen=True)
class TellDependents:
    """Tell the jobs that wait for this one how it ended."""

    state: State

    def event(self, job: str) -> DependencySucceeded | DependencyFailed:
        """The event for them; `job`: this one's id."""
        return DependencySucceeded(job) if self.state is State.SUCCEEDED else DependencyFailed(job, self.state)


Action = Start | Stop | Discard | TellDependents
Outcome = tuple[Job, tuple[Action, ...]]


class IllegalTransition(Exception):
    """An event that cannot happen in the job's state; the message includes the job's story."""

    def __init__(self, job: Job, event: Event) -> None:
        super().__init__(f"job {job.id} {job.state.told} and cannot take {event}. Its story: {'; '.join(job.story)}")
        self.job = job
        self.event = event


def submitted(job: str) -> Job:
    """A new job."""
    return Job(id=job, story=("submitted → queued",))


def handle(job: Job, event: Event) -> Outcome:
    """The job after the event, and the actions to do now, in order.

    A late event of an earlier epoch changes nothing. Raises IllegalTransition if the event cannot happen.
    """
    match event:
        case DependencySucceeded() | DependencyFailed():
            return _dependency(job, event)
        case Claimed():
            return _claimed(job, event)
        case CancelRequested():
            return _cancel_requested(job, event)
        case RetryRequested():
            return _retry_requested(job, event)
        case _:
            return _of_a_run(job, event)


def _told(job: Job, event: Event, state: State, **changes: object) -> Job:
    """The job in its new state, with the event added to its story."""
    return replace(job, state=state, story=(*job.story, f"{event} → {state}"), **changes)  # type: ignore[arg-type]


def _dependency(job: Job, event: DependencySucceeded | DependencyFailed) -> Outcome:
    if job.state is not State.QUEUED:
        return job, ()  # it was cancelled meanwhile
    if event.job in job.waiting_for_end:
        return replace(job, waiting_for_end=job.waiting_for_end - {event.job}), ()
    if event.job not in job.waiting_for:
        return job, ()  # repeated
    if isinstance(event, DependencySucceeded):
        return replace(job, waiting_for=job.waiting_for - {event.job}), ()
    error = f"job {event.job}, which it comes after, was {event.state}" if event.state is State.CANCELLED else (
        f"job {event.job}, which it comes after, {event.state}"
    )  # fmt: skip
    return _told(job, event, State.FAILED, error=error), (TellDependents(State.FAILED),)


def _claimed(job: Job, event: Claimed) -> Outcome:
    if not job.claimable or event.epoch <= job.epoch:
        raise IllegalTransition(job, event)
    changes = {"epoch": event.epoch, "attempts": job.attempts + 1, "error": None}
    return _told(job, event, State.PLANNING, **changes), (Start(event.epoch),)


def _cancel_requested(job: Job, event: CancelRequested) -> Outcome:
    if job.state is State.QUEUED:
        return _told(job, event, State.CANCELLED), (Discard(), TellDependents(State.CANCELLED))
    if job.state in ACTIVE:
        return (job, ()) if job.cancelling else (replace(job, cancelling=True), (Stop(job.epoch),))
    if job.state is State.CANCELLED:
        return job, ()
    raise IllegalTransition(job, event)


def _retry_requested(job: Job, event: RetryRequested) -> Outcome:
    if job.state not in (State.FAILED, State.CANCELLED):
        raise IllegalTransition(job, event)
    counts = {"attempts": 0, "deaths": 0, "preemptions": 0}
    waits = {"waiting_for": event.waiting_for, "waiting_for_end": event.waiting_for_end}
    return _told(job, event, State.QUEUED, cancelling=False, error=None, **counts, **waits), ()


def _of_a_run(job: Job, event: OfRun) -> Outcome:
    if event.epoch != job.epoch or job.state not in ACTIVE:
        if event.epoch <= job.epoch:
            return job, ()  # late, from an earlier run or one that has ended
        raise IllegalTransition(job, event)
    match job.state, event:
        case State.PLANNING, Planned(chunks=chunks):
            return _told(job, event, State.RUNNING, chunks=chunks, chunks_done=0), ()
        case State.RUNNING, Progressed(chunks_done=done):
            return replace(job, chunks_done=max(job.chunks_done, done), deaths=0), ()
        case State.RUNNING, Recut(chunks=chunks):
            return replace(job, chunks=chunks, chunks_done=0), ()
        case State.RUNNING, Computed():
            return _told(job, event, State.PUBLISHING, chunks_done=job.chunks), ()
        case State.PUBLISHING, Published():
            # Too late for a cancellation: the result is published.
            return _told(job, event, State.SUCCEEDED, cancelling=False), (TellDependents(State.SUCCEEDED),)
        case _, Failed(error=error, transient=transient):
            return _failed(job, event, error, transient)
        case _, Died(what=what) if not job.cancelling:
            return _died(job, event, what)
        case _, Stopped() | Preempted() | LeaseLost() | Died():
            if job.cancelling:
                return _cancelled(job, event)
            if isinstance(event, Preempted):
                job = replace(job, preemptions=job.preemptions + 1)
            return _told(job, event, State.QUEUED, attempts=job.attempts - 1), ()  # it has not failed
    raise IllegalTransition(job, event)


def _failed(job: Job, event: Failed, error: str, transient: bool) -> Outcome:
    if job.cancelling:
        return _cancelled(job, event)
    if transient and job.attempts < MOST_ATTEMPTS:
        return _told(job, event, State.QUEUED, error=error), ()
    return _told(job, event, State.FAILED, error=error), (TellDependents(State.FAILED),)


def _died(job: Job, event: Event, what: str) -> Outcome:
    job = replace(job, attempts=job.attempts - 1, deaths=job.deaths + 1)
    if job.deaths < MOST_DEATHS:
        return _told(job, event, State.QUEUED), ()
    error = (
        f"{what} died {job.deaths} times at this job, which finished no chunk meanwhile: check its input, then retry"
    )
    return _told(job, event, State.FAILED, error=error), (TellDependents(State.FAILED),)


def _cancelled(job: Job, event: Event) -> Outcome:
    ended = _told(job, event, State.CANCELLED, cancelling=False)
    return ended, (Discard(), TellDependents(State.CANCELLED))

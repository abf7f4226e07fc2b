"""Whatever users, runs, kills of the server and the clock do to stored jobs, in any order, against a plain model."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.api_models import TERMINAL, State
from pipeline.service.jobs import (
    ACTIVE,
    MOST_ATTEMPTS,
    CancelRequested,
    Computed,
    Discard,
    Failed,
    IllegalTransition,
    LeaseLost,
    Planned,
    Preempted,
    Progressed,
    Published,
    Recut,
    Stop,
    Stopped,
)
from pipeline.service.store import (
    DependencyForgotten,
    Facts,
    JobFilter,
    NewJob,
    NoSuchJob,
    OutputTaken,
    Store,
    Used,
)
from pipeline.service.store.opened import HALF_LIFE_S

QUEUED, PLANNING, RUNNING, PUBLISHING, SUCCEEDED, FAILED, CANCELLED = State
LEASE_S = 30.0
WHICH = st.integers(0, 11)  # of the jobs there are
UNSEEN = ("new", "messages", "planned", "unmet", "parked")
ENDS = ("failed", "a worker died", "stopped", "preempted", "lease lost")


@dataclass
class Known:
    """What a user may expect of a job."""

    id: str
    number: int
    new: NewJob
    changed_at: float
    state: State = QUEUED
    epoch: int = 0
    attempts: int = 0
    preemptions: int = 0
    cancelling: bool = False
    chunks: int | None = None
    chunks_done: int = 0
    error: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    device_seconds: float = 0.0
    runner: str | None = None
    lease_until: float | None = None
    receipt: dict | None = None
    messages: list[str] = field(default_factory=lambda: ["queued"])
    unmet: set[str] = field(default_factory=set)  # jobs that have to end first
    parked: bool = False  # until another of its array has ended
    planned: int = 0  # the moment of its last claim

    def seen(self):
        return {name: value for name, value in vars(self).items() if name not in UNSEEN}


class Jobs(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.server, self.now, self.moment = self.folder / "jobs.sqlite", 0, 1000.0, 0
        self.jobs: dict[str, Known] = {}
        self.succeeded, self.untold = set(), []
        self.shares: dict[str, tuple[float, float]] = {}
        self.accepted = 0
        self.woken, self.changed = set(), set()

    @initialize()
    def open(self):
        self.store = Store(self.path)
        self.store.job_events.notify = self.woken.update
        with self.store._database.reading() as connection:  # a power failure is no rule here
            connection.execute("PRAGMA synchronous = OFF")

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)

    # The model

    def tick(self):
        self.now += 1.0
        self.woken.clear()
        self.changed.clear()

    def one(self, which, states=frozenset(State)):
        """One of the jobs in these states, if there are any, or of all."""
        preferred = [job for job in self.jobs.values() if job.state in states] or [*self.jobs.values()]
        return preferred[which % len(preferred)]

    def waiting_for(self, job):
        return job.new.after - self.succeeded

    def ready(self, job):
        return job.state is QUEUED and not self.waiting_for(job) and not job.unmet and not job.parked

    def array_of(self, job):
        """The other unfinished jobs of its array."""
        array = job.new.array_id
        others = [each for each in self.jobs.values() if each.new.array_id == array and each is not job]
        return [each for each in others if each.state not in TERMINAL]

    def writers(self, job):
        return [each for each in self.jobs.values() if each.new.output == job.new.output and each.state not in TERMINAL]

    def change(self, job, state=None, **values):
        vars(job).update(values, changed_at=self.now)
        self.changed.add(job.id)
        if state is None or state is job.state:
            return
        if state is PLANNING:
            self.moment += 1
            job.started_at, job.planned = job.started_at or self.now, self.moment
        if job.state in TERMINAL:
            job.started_at = None
        job.state = state
        job.finished_at = self.now if state in TERMINAL else None
        if state not in ACTIVE:
            job.runner = job.lease_until = None
        job.messages.append(f"{state}: {job.error}" if job.error else str(state))
        if state in TERMINAL and job.new.throttle is not None:
            parked = [each for each in self.array_of(job) if each.parked]
            if parked and not job.parked:
                parked[0].parked = False
                self.change(parked[0])
            job.parked = False
        if state in TERMINAL:
            for each in self.jobs.values():
                if job.id in each.unmet:
                    each.unmet.discard(job.id)
                    if each.state is QUEUED:
                        self.change(each)
        if state is SUCCEEDED:
            waiting = [each for each in self.jobs.values() if job.id in self.waiting_for(each)]
            self.succeeded.add(job.id)
            for each in waiting:
                if each.state is QUEUED:
                    self.change(each)
        if state in (FAILED, CANCELLED):
            self.untold.append(job)
            if self.untold[0] is job:  # the first to end; those after it before those after them
                for before in self.untold:
                    for each in sorted(self.jobs.values(), key=lambda each: each.id):
                        if each.state is QUEUED and before.id in each.new.after:
                            self.doom(each, before)
                self.untold.clear()

    def doom(self, job, before):
        self.change(job, FAILED, error=f"job {before.id}, which it comes after, {said(before.state)}")

    def stop(self, job):
        self.change(job, CANCELLED if job.cancelling else QUEUED, cancelling=False,
                    attempts=job.attempts - (not job.cancelling))  # fmt: skip

    def usage(self, owner):
        amount, at = self.shares.get(owner, (0.0, self.now))
        return amount * 0.5 ** ((self.now - at) / HALF_LIFE_S)

    # Users

    @rule(
        owner=st.sampled_from(["ada", "bob"]),
        priority=st.integers(-1, 1),
        outputs=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        after=st.sets(WHICH, max_size=2),
        after_any=st.sets(WHICH, max_size=2),
        throttle=st.sampled_from([None, 1, 2]),
    )
    def submit(self, owner, priority, outputs, after, after_any, throttle):
        self.tick()
        befores, any_befores = (sorted({self.one(each).id for each in which} if self.jobs else ())
                                for which in (after, after_any))  # fmt: skip
        array = f"array-{self.now}" if len(outputs) > 1 else None
        queue = {"after_any": frozenset(any_befores), "throttle": throttle if array else None}
        new = [
            NewJob(owner=owner, workload="smooth", input="in.npy", output=f"{number}.npy", parameters={"size": "3"},
                   priority=priority, after=frozenset(befores), array_id=array, array_index=array and index, **queue)
            for index, number in enumerate(outputs)
        ]  # fmt: skip
        bad = [self.jobs[each] for each in befores if self.jobs[each].state in (FAILED, CANCELLED)]
        names = [each.output for each in new]
        taken = {job.new.output for job in self.jobs.values() if job.state not in TERMINAL} & set(names)
        if taken or (len(set(names)) < len(names) and not bad):
            with pytest.raises(OutputTaken, match="writes it; wait for it, or name another output"):
                self.store.accept(new, now=self.now)
            return
        for each, job in zip(new, self.store.accept(new, now=self.now), strict=True):
            self.accepted = max(self.accepted, self.store.job(job).number - 1) + 1
            unmet = {each for each in set(any_befores) - set(befores) if self.jobs[each].state not in TERMINAL}
            self.jobs[job] = Known(job, self.accepted, each, self.now, unmet=unmet)
            turns = [each for each in self.array_of(self.jobs[job]) if not each.parked]
            self.jobs[job].parked = new[0].throttle is not None and len(turns) >= new[0].throttle
            self.changed.add(job)
            if bad:
                self.doom(self.jobs[job], bad[0])

    @precondition(lambda self: self.jobs)
    @rule(which=WHICH)
    def cancel(self, which):
        self.tick()
        job = self.one(which)
        if job.state in (SUCCEEDED, FAILED):
            with pytest.raises(IllegalTransition):
                self.store.apply(job.id, CancelRequested(), now=self.now)
            return
        _, actions = self.store.apply(job.id, CancelRequested(), now=self.now)
        if job.state is QUEUED:
            assert actions == (Discard(),)
            self.change(job, CANCELLED)
        elif job.state in ACTIVE and not job.cancelling:
            assert actions == (Stop(job.epoch),)
            self.change(job, cancelling=True)
        else:
            assert actions == ()

    @precondition(lambda self: self.jobs)
    @rule(which=WHICH)
    def retry(self, which):
        self.tick()
        job = self.one(which, (FAILED, CANCELLED))
        others = [each for each in self.writers(job) if each is not job]
        refused = None
        if others:
            refused = OutputTaken
        elif job.state not in (FAILED, CANCELLED):
            refused = IllegalTransition
        elif self.waiting_for(job) - self.jobs.keys():
            refused = DependencyForgotten
        if refused is not None:
            with pytest.raises(refused):
                self.store.retry(job.id, now=self.now)
            return
        after, actions = self.store.retry(job.id, now=self.now)
        bad = [self.jobs[each] for each in sorted(self.waiting_for(job)) if self.jobs[each].state in TERMINAL]
        self.change(job, QUEUED, attempts=0, preemptions=0, error=None)
        turns = [each for each in self.array_of(job) if not each.parked]
        job.parked = job.new.throttle is not None and len(turns) >= job.new.throttle
        if bad:
            self.doom(job, bad[0])
        assert (after.state, actions) == (job.state, ())

    # Runs

    @rule(cap=st.integers(1, 3))
    def claim(self, cap):
        self.tick()
        active = [job.new.owner for job in self.jobs.values() if job.state in ACTIVE]
        ready = [job for job in self.jobs.values() if self.ready(job) and active.count(job.new.owner) < cap]
        found = self.store.claim(str(self.server), now=self.now, lease_s=LEASE_S, owner_cap=cap)
        if not ready:
            assert found is None
            assert self.store.most_urgent(now=self.now, owner_cap=cap) is None
            return
        job = min(ready, key=lambda job: (-job.new.priority, self.usage(job.new.owner), job.number))
        assert found.job.id == job.id
        self.change(job, PLANNING, epoch=job.epoch + 1, attempts=job.attempts + 1, error=None,
                    runner=str(self.server), lease_until=self.now + LEASE_S)  # fmt: skip

    @precondition(lambda self: any(job.state in ACTIVE for job in self.jobs.values()))
    @rule(which=WHICH, chunks=st.integers(1, 9))
    def advance(self, which, chunks):
        self.tick()
        job = self.one(which, ACTIVE)
        if job.state is PLANNING:
            self.store.apply(job.id, Planned(job.epoch, chunks), now=self.now)
            self.change(job, RUNNING, chunks=chunks, chunks_done=0)
        elif job.state is RUNNING:
            self.store.apply(job.id, Computed(job.epoch), now=self.now)
            self.change(job, PUBLISHING, chunks_done=job.chunks)
        else:
            facts = Facts(receipt={"chunks": job.chunks})
            self.store.apply(job.id, Published(job.epoch), now=self.now, facts=facts)
            self.change(job, SUCCEEDED, cancelling=False, receipt=facts.receipt)

    @precondition(lambda self: any(job.state is RUNNING for job in self.jobs.values()))
    @rule(which=WHICH, number=st.integers(1, 9), recut=st.booleans())
    def progress(self, which, number, recut):
        self.tick()
        job = self.one(which, (RUNNING,))
        done = min(number, job.chunks)
        self.store.apply(job.id, Recut(job.epoch, number) if recut else Progressed(job.epoch, done), now=self.now)
        if recut:
            self.change(job, chunks=number, chunks_done=0)
        else:
            self.change(job, chunks_done=max(done, job.chunks_done))

    @precondition(lambda self: any(job.state in ACTIVE for job in self.jobs.values()))
    @rule(which=WHICH, how=st.sampled_from(ENDS), seconds=st.integers(0, 9))
    def end(self, which, how, seconds):
        self.tick()
        job = self.one(which, ACTIVE)
        event = {
            "stopped": Stopped(job.epoch),
            "preempted": Preempted(job.epoch),
            "lease lost": LeaseLost(job.epoch),
        }.get(how) or Failed(job.epoch, how, transient=how != "failed")
        facts = Facts(used=Used(device_seconds=float(seconds)), run_seconds=seconds / 2)
        _, actions = self.store.apply(job.id, event, now=self.now, facts=facts)
        if seconds:
            job.device_seconds += seconds
            self.shares[job.new.owner] = (self.usage(job.new.owner) + seconds, self.now)
        assert actions == ((Discard(),) if job.cancelling else ())
        if job.cancelling or not isinstance(event, Failed):
            job.preemptions += isinstance(event, Preempted) and not job.cancelling
            self.stop(job)
        else:
            again = event.transient and job.attempts < MOST_ATTEMPTS
            self.change(job, QUEUED if again else FAILED, error=how)

    @precondition(lambda self: any(job.epoch > 0 for job in self.jobs.values()))
    @rule(which=WHICH, event=st.sampled_from([Published(0), Failed(0, "late", transient=False), Stopped(0)]))
    def hear_of_an_earlier_run(self, which, event):
        self.tick()
        job = self.one(which)
        epoch = job.epoch - (job.state in ACTIVE)
        facts = Facts(receipt={"late": True}, used=Used(device_seconds=1.0))
        assert self.store.apply(job.id, replace(event, epoch=epoch), now=self.now, facts=facts)[1] == ()
        job.device_seconds += 1
        self.shares[job.new.owner] = (self.usage(job.new.owner) + 1.0, self.now)

    # The server and the clock

    @rule()
    def restart(self):
        """Killed, and started again."""
        self.tick()
        self.store.close()
        self.server += 1
        self.open()
        left = [(job.id, job.epoch) for job in self.jobs.values() if job.state in ACTIVE]
        assert self.store.lost(str(self.server), now=self.now, lease_s=LEASE_S, others_too=True) == left
        for job, epoch in left:
            self.store.apply(job, LeaseLost(epoch), now=self.now)
            self.stop(self.jobs[job])

    @rule(seconds=st.sampled_from([15.0, 35.0, HALF_LIFE_S]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.jobs)
    @rule(which=st.sets(WHICH, max_size=3))
    def renew(self, which):
        self.tick()
        jobs = {self.one(each).id for each in which}
        self.store.renew(str(self.server), sorted(jobs), now=self.now, lease_s=LEASE_S)
        for job in jobs:
            if self.jobs[job].state in ACTIVE:
                self.jobs[job].lease_until = self.now + LEASE_S

    @rule()
    def expire(self):
        self.tick()
        left = [(job.id, job.epoch) for job in self.jobs.values() if job.state in ACTIVE and job.lease_until < self.now]
        assert self.store.lost(str(self.server), now=self.now, lease_s=LEASE_S, others_too=False) == left
        for job, epoch in left:
            self.store.apply(job, LeaseLost(epoch), now=self.now)
            self.stop(self.jobs[job])

    @rule(keep_s=st.sampled_from([0.0, 20.0]))
    def prune(self, keep_s):
        self.tick()
        unfinished = [job.new for job in self.jobs.values() if job.state not in TERMINAL]
        needed = {each for new in unfinished for each in new.after | new.after_any}
        forgotten = {
            job.id
            for job in self.jobs.values()
            if job.state in TERMINAL and job.id not in needed and job.finished_at < self.now - keep_s
        }
        assert set(self.store.prune(now=self.now, keep_s=keep_s)) == forgotten
        for job in forgotten:
            del self.jobs[job]
            with pytest.raises(NoSuchJob):
                self.store.job(job)

    # What holds after each

    @invariant()
    def every_job_is_as_known(self):
        listed = self.store.list_jobs()
        assert [found.job.id for found in listed] == [job.id for job in reversed(self.jobs.values())]
        for found in listed:
            assert as_seen(replace(found, receipt=self.jobs[found.job.id].receipt)) == self.jobs[found.job.id].seen()
        assert self.woken == self.changed
        for name in self.changed:
            found, job = self.store.job(name), self.jobs[name]
            assert as_seen(found) == job.seen()
            waiting = self.waiting_for(job), job.unmet
            assert (found.job.waiting_for, found.job.waiting_for_end) == waiting
            assert found.asked == replace(job.new, after=frozenset(), after_any=frozenset())
            assert [event.message for event in self.store.events(name)] == job.messages

    @invariant()
    def counts_and_lists_agree(self):
        states = [job.state for job in self.jobs.values()]
        assert self.store.counts() == {state: states.count(state) for state in State}
        waiting = [job.changed_at for job in self.jobs.values() if self.ready(job)]
        assert self.store.oldest_queued() == min(waiting, default=None)
        state = list(State)[int(self.now) % len(State)]
        text, _ = self.store.list_json(JobFilter(state=state, owner="ada"), limit=99)
        expected = [job for job in self.jobs.values() if job.state is state and job.new.owner == "ada"]
        assert [found["id"] for found in json.loads(text)] == [job.id for job in reversed(expected)]

    @invariant()
    def of_an_array_so_many_run(self):
        for job in self.jobs.values():
            if job.state in ACTIVE and job.new.throttle is not None:
                assert 1 + sum(each.state in ACTIVE for each in self.array_of(job)) <= job.new.throttle

    @invariant()
    def one_job_writes_an_output(self):
        for job in self.jobs.values():
            assert len(self.writers(job)) <= 1
            later = [
                each
                for each in self.jobs.values()
                if each.new.output == job.new.output
                and (each.state is FAILED or each.state not in TERMINAL)
                and each.planned > job.planned
            ]
            running = any(each.state in ACTIVE for each in self.writers(job))
            if job.state is CANCELLED or job.id in self.changed:
                assert self.store.abandoned(job.id) == (job.state is CANCELLED and not running and not later)


def as_seen(found):
    """The fields of `Known` in a stored job, which has those of the state machine in `job`."""
    return {
        name: getattr(found.job if hasattr(found.job, name) else found, name)
        for name in Known.__dataclass_fields__
        if name not in UNSEEN
    }


def said(state):
    return "was cancelled" if state is CANCELLED else str(state)


TestJobs = pytest.mark.slow(Jobs.TestCase)
TestJobs.settings = settings(stateful_step_count=30, deadline=None)

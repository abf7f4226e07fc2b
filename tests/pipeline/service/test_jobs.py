"""The state machine of jobs: its whole transition table, and any sequence of events against a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.api_models import TERMINAL, State
from pipeline.service.jobs import (
    ACTIVE,
    MOST_ATTEMPTS,
    MOST_DEATHS,
    MOST_PREEMPTIONS,
    CancelRequested,
    Claimed,
    Computed,
    DependencyFailed,
    DependencySucceeded,
    Died,
    Discard,
    Failed,
    IllegalTransition,
    Job,
    LeaseLost,
    Planned,
    Preempted,
    Progressed,
    Published,
    Recut,
    RetryRequested,
    Start,
    Stop,
    Stopped,
    TellDependents,
    handle,
    submitted,
)

QUEUED, PLANNING, RUNNING, PUBLISHING, SUCCEEDED, FAILED, CANCELLED = State
EPOCH = 3
EVENTS = {
    "claimed": Claimed(EPOCH + 1),
    "planned": Planned(EPOCH, 7),
    "progressed": Progressed(EPOCH, 4),
    "cut anew": Recut(EPOCH, 13),
    "computed": Computed(EPOCH),
    "published": Published(EPOCH),
    "failed": Failed(EPOCH, "in.npy: truncated", transient=False),
    "failed, try again": Failed(EPOCH, "a worker died", transient=True),
    "stopped": Stopped(EPOCH),
    "preempted": Preempted(EPOCH),
    "lease lost": LeaseLost(EPOCH),
    "died": Died(EPOCH, "the server"),
    "cancel": CancelRequested(),
    "retry": RetryRequested(),
    "dependency in": DependencySucceeded("a"),
    "dependency failed": DependencyFailed("a", FAILED),
}
RUN_EVENTS = list(EVENTS)[1:12]
ILLEGAL = None
_OUTSIDE = {"claimed": ILLEGAL, "retry": ILLEGAL}
_ENDS = {"failed": FAILED} | dict.fromkeys(["failed, try again", "stopped", "preempted", "lease lost", "died"], QUEUED)
# Where an event leads from a state; the same state where it changes nothing but numbers.
TABLE = {
    QUEUED: {
        **dict.fromkeys(RUN_EVENTS, QUEUED), "claimed": PLANNING, "cancel": CANCELLED, "retry": ILLEGAL,
        "dependency in": QUEUED, "dependency failed": QUEUED,
    },
    PLANNING: {
        **_OUTSIDE, **_ENDS, "planned": RUNNING, "progressed": ILLEGAL, "cut anew": ILLEGAL, "computed": ILLEGAL,
        "published": ILLEGAL,
        "cancel": PLANNING, "dependency in": PLANNING, "dependency failed": PLANNING,
    },
    RUNNING: {
        **_OUTSIDE, **_ENDS, "planned": ILLEGAL, "progressed": RUNNING, "cut anew": RUNNING, "computed": PUBLISHING,
        "published": ILLEGAL,
        "cancel": RUNNING, "dependency in": RUNNING, "dependency failed": RUNNING,
    },
    PUBLISHING: {
        **_OUTSIDE, **_ENDS, "planned": ILLEGAL, "progressed": ILLEGAL, "cut anew": ILLEGAL, "computed": ILLEGAL,
        "published": SUCCEEDED,
        "cancel": PUBLISHING, "dependency in": PUBLISHING, "dependency failed": PUBLISHING,
    },
    SUCCEEDED: {
        **dict.fromkeys(RUN_EVENTS, SUCCEEDED), **_OUTSIDE, "cancel": ILLEGAL,
        "dependency in": SUCCEEDED, "dependency failed": SUCCEEDED,
    },
    FAILED: {
        **dict.fromkeys(RUN_EVENTS, FAILED), "claimed": ILLEGAL, "cancel": ILLEGAL, "retry": QUEUED,
        "dependency in": FAILED, "dependency failed": FAILED,
    },
    CANCELLED: {
        **dict.fromkeys(RUN_EVENTS, CANCELLED), "claimed": ILLEGAL, "cancel": CANCELLED, "retry": QUEUED,
        "dependency in": CANCELLED, "dependency failed": CANCELLED,
    },
}  # fmt: skip


def job_in(state, **changes):
    return Job(id="j", state=state, epoch=EPOCH, attempts=1, chunks=7, story=("it began", "it went on"), **changes)


def test_a_new_job_and_what_its_dependents_are_told():
    assert submitted("j") == Job(id="j", story=("submitted → queued",))
    assert TellDependents(SUCCEEDED).event("j") == DependencySucceeded("j")
    assert TellDependents(CANCELLED).event("j") == DependencyFailed("j", CANCELLED)


def test_the_table_is_whole():
    assert set(TABLE) == set(State)
    assert all(set(row) == set(EVENTS) for row in TABLE.values())


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.parametrize("state", State)
def test_every_event_in_every_state(state, name):
    job, event = job_in(state), EVENTS[name]
    if TABLE[state][name] is ILLEGAL:
        with pytest.raises(
            IllegalTransition, match=rf"job j (is|has) {state} and cannot .* it began; it went on$"
        ) as said:
            handle(job, event)
        assert (said.value.job, said.value.event) == (job, event)
        return
    after, actions = handle(job, event)
    assert after.state is TABLE[state][name]
    assert (TellDependents(after.state) in actions) == (after.state is not state and after.state in TERMINAL)
    if after.state is not state:
        assert after.story == ("it began", "it went on", f"{event} → {after.state}")


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("name", RUN_EVENTS)
def test_an_earlier_run_is_not_heard(state, name):
    job = job_in(state)
    assert handle(job, replace(EVENTS[name], epoch=EPOCH - 1)) == (job, ())


@pytest.mark.parametrize("name", RUN_EVENTS)
def test_a_run_that_nobody_started_cannot_speak(name):
    event = replace(EVENTS[name], epoch=EPOCH + 1)
    with pytest.raises(IllegalTransition) as said:
        handle(job_in(RUNNING), event)
    assert said.value.event == event


def test_a_claim_needs_an_epoch_of_its_own():
    for epoch in (EPOCH - 1, EPOCH):
        with pytest.raises(IllegalTransition):
            handle(job_in(QUEUED), Claimed(epoch))


@pytest.mark.parametrize("state", sorted(ACTIVE))
@pytest.mark.parametrize("end", ["failed", "failed, try again", "stopped", "preempted", "lease lost", "died"])
def test_a_run_asked_to_stop_for_good_ends_cancelled(state, end):
    job, actions = handle(job_in(state), CancelRequested())
    assert actions == (Stop(EPOCH),)
    assert handle(job, CancelRequested()) == (job, ())
    after, actions = handle(job, EVENTS[end])
    assert (after.state, after.cancelling, after.story[-1]) == (CANCELLED, False, f"{EVENTS[end]} → cancelled")
    assert actions == (Discard(), TellDependents(CANCELLED))


def test_a_cancellation_that_comes_too_late_leaves_the_result():
    job, _ = handle(job_in(PUBLISHING), CancelRequested())
    after, actions = handle(job, Published(EPOCH))
    assert (after.state, after.cancelling, actions) == (SUCCEEDED, False, (TellDependents(SUCCEEDED),))


def test_a_job_that_is_cut_anew_begins_anew():
    job, _ = handle(job_in(RUNNING), Progressed(EPOCH, 6))
    job, actions = handle(job, Recut(EPOCH, 13))
    assert (job.chunks, job.chunks_done, actions) == (13, 0, ())
    job, _ = handle(job, Progressed(EPOCH, 2))
    assert job.chunks_done == 2


def test_progress_does_not_fall_until_the_job_is_planned_again():
    job, _ = handle(job_in(RUNNING), Progressed(EPOCH, 6))
    job, _ = handle(job, Progressed(EPOCH, 4))
    assert job.chunks_done == 6
    job, _ = handle(job, LeaseLost(EPOCH))
    job, _ = handle(job, Claimed(EPOCH + 1))
    assert (job.chunks, job.chunks_done) == (7, 6)
    job, _ = handle(job, Planned(EPOCH + 1, 5))
    assert (job.chunks, job.chunks_done) == (5, 0)
    job, _ = handle(job, Computed(EPOCH + 1))
    assert (job.chunks, job.chunks_done) == (5, 5)


def test_attempts_end():
    job = submitted("j")
    for epoch in range(1, MOST_ATTEMPTS + 1):
        job, actions = handle(job, Claimed(epoch))
        assert actions == (Start(epoch),)
        assert job.error is None
        job, _ = handle(job, Failed(epoch, "a worker died", transient=True))
        assert (job.state, job.error) == (QUEUED if epoch < MOST_ATTEMPTS else FAILED, "a worker died")
    job, _ = handle(job, RetryRequested())
    assert (job.state, job.attempts, job.error) == (QUEUED, 0, None)


def test_what_ended_with_its_server_was_no_attempt():
    """A job of weeks lives through many a restart, and then has its three attempts all the same."""
    job = submitted("j")
    for epoch in range(1, 11):
        job, _ = handle(job, Claimed(epoch))
        assert job.attempts == 1
        job, _ = handle(job, Stopped(epoch) if epoch % 2 else LeaseLost(epoch))
        assert (job.state, job.attempts) == (QUEUED, 0)
    job, _ = handle(job, Claimed(11))
    job, _ = handle(job, Failed(11, "a worker died", transient=True))
    assert (job.state, job.attempts) == (QUEUED, 1)


def test_a_preempted_job_goes_back_to_the_queue_a_bounded_number_of_times():
    job = submitted("j")
    for epoch in range(1, MOST_PREEMPTIONS + 1):
        job, _ = handle(job, Claimed(epoch))
        assert not job.preemptible, "it has no chunks to keep yet"
        job, _ = handle(job, Planned(epoch, 7))
        assert job.preemptible
        assert not handle(job, CancelRequested())[0].preemptible
        job, _ = handle(job, Progressed(epoch, epoch))
        job, actions = handle(job, Preempted(epoch))
        assert (job.state, job.preemptions, job.attempts, job.chunks_done, actions) == (QUEUED, epoch, 0, epoch, ())
    for event in (Claimed(epoch + 1), Planned(epoch + 1, 7)):
        job, _ = handle(job, event)
    assert not job.preemptible
    job, _ = handle(job, Failed(epoch + 1, "in.npy: truncated", transient=False))
    assert handle(job, RetryRequested())[0].preemptions == 0


def test_deaths_without_progress_end():
    """A death is no attempt. A finished chunk, or a retry, lets the count begin anew."""
    job, epoch = submitted("j"), 0

    def die():
        nonlocal job, epoch
        epoch += 1
        job, _ = handle(job, Claimed(epoch))
        job, actions = handle(job, Died(epoch, "the server"))
        assert job.attempts == 0
        return actions

    for _ in range(2):
        for deaths in range(1, MOST_DEATHS):
            assert (die(), job.state, job.deaths, job.error) == ((), QUEUED, deaths, None)
        epoch += 1
        for event in (Claimed(epoch), Planned(epoch, 7), Progressed(epoch, 1), Stopped(epoch)):
            job, _ = handle(job, event)
    for _ in range(1, MOST_DEATHS):
        die()
    assert die() == (TellDependents(FAILED),)
    assert (job.state, job.story[-1]) == (FAILED, f"{Died(epoch, 'the server')} → failed")
    assert job.error.startswith(f"the server died {MOST_DEATHS} times at this job, which finished no chunk meanwhile")
    job, _ = handle(job, RetryRequested())
    assert (job.state, job.deaths, job.error) == (QUEUED, 0, None)


def test_a_job_waits_for_all_that_it_comes_after():
    job = replace(submitted("j"), waiting_for=frozenset("ab"))
    with pytest.raises(IllegalTransition):
        handle(job, Claimed(1))
    for name in "ab":
        assert not job.claimable
        job, _ = handle(job, DependencySucceeded(name))
    assert job.claimable


@pytest.mark.parametrize(("state", "said"), [(FAILED, "b, which it comes after, failed"), (CANCELLED, "was cancelled")])
def test_a_job_fails_with_what_it_comes_after(state, said):
    event = DependencyFailed("b", state)
    job, actions = handle(replace(submitted("j"), waiting_for=frozenset("ab")), event)
    assert (job.state, actions, job.story[-1]) == (FAILED, (TellDependents(FAILED),), f"{event} → failed")
    assert said in job.error
    again, _ = handle(job, RetryRequested(frozenset("a")))
    assert again.waiting_for == frozenset("a")


@pytest.mark.parametrize("event", [DependencySucceeded("b"), DependencyFailed("b", FAILED)])
def test_a_job_may_wait_for_an_end_of_any_kind(event):
    job = replace(submitted("j"), waiting_for=frozenset("a"), waiting_for_end=frozenset("bc"))
    job, actions = handle(job, event)
    assert (job.waiting_for, job.waiting_for_end, actions) == (frozenset("a"), frozenset("c"), ())
    assert handle(job, event) == (job, ())
    job, _ = handle(job, DependencyFailed("c", CANCELLED))
    assert not job.claimable
    assert handle(job, DependencySucceeded("a"))[0].claimable
    job, _ = handle(job, CancelRequested())
    job, _ = handle(job, RetryRequested(frozenset(), frozenset("b")))
    assert (job.waiting_for, job.waiting_for_end) == (frozenset(), frozenset("b"))


@pytest.mark.parametrize("event", [DependencySucceeded("a"), DependencyFailed("a", CANCELLED)])
@pytest.mark.parametrize("state", [each for each in State if each is not QUEUED])
def test_a_job_that_no_longer_waits_ignores_its_dependencies(state, event):
    job = job_in(state, waiting_for=frozenset("a"))
    assert handle(job, event) == (job, ())


class AnySequence(RuleBasedStateMachine):
    """Events in any order, from a run that is alive, one that was, and users, against what a user may rely on."""

    def __init__(self):
        super().__init__()
        self.job = submitted("j")
        self.epoch = 0
        self.told = []  # how dependents were told that it ended, since it was last queued
        self.published = 0
        self.started = set()
        self.wanted = True  # no cancellation since it was submitted or retried
        self.awaited = frozenset()  # jobs that it comes after, by which of their ends will do
        self.awaited_ends = frozenset()

    def take(self, event):
        before = self.job
        self.job, actions = handle(before, event)
        assert self.job.epoch >= before.epoch
        assert self.job.story[: len(before.story)] == before.story
        self.told += [action.state for action in actions if isinstance(action, TellDependents)]
        for action in actions:
            if isinstance(action, Start):
                assert action.epoch not in self.started
                self.started.add(action.epoch)
            if isinstance(action, Discard):
                assert self.job.state is CANCELLED
        return actions

    @precondition(lambda self: self.job.claimable)
    @rule()
    def claim(self):
        self.epoch += 1
        assert self.take(Claimed(self.epoch)) == (Start(self.epoch),)

    @precondition(lambda self: self.job.state is PLANNING)
    @rule(chunks=st.integers(1, 9))
    def plan(self, chunks):
        self.take(Planned(self.epoch, chunks))

    @precondition(lambda self: self.job.state is RUNNING)
    @rule(done=st.integers(0, 9))
    def progress(self, done):
        before = self.job.chunks_done
        self.take(Progressed(self.epoch, min(done, self.job.chunks)))
        assert self.job.chunks_done >= before

    @precondition(lambda self: self.job.state is RUNNING)
    @rule(chunks=st.integers(1, 99))
    def cut_anew(self, chunks):
        self.take(Recut(self.epoch, chunks))

    @precondition(lambda self: self.job.state is RUNNING)
    @rule()
    def compute(self):
        self.take(Computed(self.epoch))

    @precondition(lambda self: self.job.state is PUBLISHING)
    @rule()
    def publish(self):
        self.take(Published(self.epoch))
        self.published += 1

    @precondition(lambda self: self.job.state in ACTIVE)
    @rule(end=st.sampled_from(["failed", "failed, try again", "stopped", "lease lost", "died"]))
    def end(self, end):
        self.take(replace(EVENTS[end], epoch=self.epoch))

    @precondition(lambda self: self.epoch > 1)
    @rule(name=st.sampled_from(RUN_EVENTS), data=st.data())
    def hear_of_an_earlier_run(self, name, data):
        before = self.job
        assert self.take(replace(EVENTS[name], epoch=data.draw(st.integers(1, self.epoch - 1)))) == ()
        assert self.job == before

    @precondition(lambda self: self.job.preemptible)
    @rule()
    def preempt(self):
        before = self.job
        assert self.take(Preempted(self.epoch)) == ()
        assert self.job.state is QUEUED
        assert (self.job.chunks_done, self.job.preemptions) == (before.chunks_done, before.preemptions + 1)

    @precondition(lambda self: self.job.state not in (SUCCEEDED, FAILED))
    @rule()
    def cancel(self):
        self.take(CancelRequested())
        self.wanted = False

    @precondition(lambda self: self.job.state in (FAILED, CANCELLED))
    @rule(
        awaited=st.frozensets(st.sampled_from("bcd"), max_size=2),
        ends=st.frozensets(st.sampled_from("efg"), max_size=2),
    )
    def retry(self, awaited, ends):
        self.take(RetryRequested(awaited, ends))
        self.told.clear()
        self.wanted, self.awaited, self.awaited_ends = True, awaited, ends

    @precondition(lambda self: self.job.state is QUEUED and self.awaited | self.awaited_ends)
    @rule(data=st.data(), end=st.sampled_from([SUCCEEDED, FAILED, CANCELLED]))
    def hear_of_what_it_waits_for(self, data, end):
        name = data.draw(st.sampled_from(sorted(self.awaited | self.awaited_ends)))
        dooms = name in self.awaited and end is not SUCCEEDED
        self.take(DependencySucceeded(name) if end is SUCCEEDED else DependencyFailed(name, end))
        if dooms:
            assert self.job.state is FAILED
        else:
            self.awaited, self.awaited_ends = self.awaited - {name}, self.awaited_ends - {name}

    @rule(event=st.sampled_from([DependencySucceeded("a"), DependencyFailed("a", FAILED)]))
    def hear_of_what_it_does_not_wait_for(self, event):
        before = self.job
        assert self.take(event) == ()
        assert self.job == before

    @invariant()
    def dependents_are_told_once(self):
        assert self.told == ([self.job.state] if self.job.state in TERMINAL else [])

    @invariant()
    def no_more_is_done_than_there_is(self):
        assert self.job.chunks_done <= (self.job.chunks or 0)

    @invariant()
    def it_is_published_at_most_once(self):
        assert self.published == (self.job.state is SUCCEEDED)

    @invariant()
    def what_nobody_cancelled_is_not_cancelled(self):
        assert not (self.wanted and (self.job.cancelling or self.job.state is CANCELLED))

    @invariant()
    def an_unwanted_job_is_not_run_again(self):
        assert self.wanted or self.job.state is not QUEUED

    @invariant()
    def deaths_are_counted_up_to_the_last(self):
        assert 0 <= self.job.deaths < MOST_DEATHS or self.job.state is FAILED

    @invariant()
    def it_waits_for_all_that_it_comes_after(self):
        waits = bool(self.awaited | self.awaited_ends)
        assert self.job.claimable == (self.job.state is QUEUED and not waits)

    @invariant()
    def it_is_preempted_no_more_than_it_may_be(self):
        assert 0 <= self.job.preemptions <= MOST_PREEMPTIONS

    @invariant()
    def it_tries_no_more_than_it_may(self):
        assert 0 <= self.job.attempts <= min(MOST_ATTEMPTS, len(self.started))


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(stateful_step_count=30, deadline=None)

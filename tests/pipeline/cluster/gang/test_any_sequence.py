"""Gangs and their lock, whatever happens, in any order: in one thread, without processes or waiting."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.cluster.gang import gang, gang_lock
from pipeline.cluster.gang.gang import GangLimits, run_gang
from pipeline.cluster.gang.gang_lock import one_at_a_time
from pipeline.cluster.gang.member import (
    Introduction,
    RankOutcome,
    end_process,
    give_up_rank,
    introduce,
    leave_gang,
    run_rank,
)
from pipeline.errors import Aborted, ClusterError, RankLost

_numbers = itertools.count()


class Enough(Exception):
    pass


class FurtherLock:
    """A lock between processes: another one may have it, or its scheduler be gone."""

    def __init__(self):
        self.ours = self.others = self.gone = False

    def acquire(self, *, timeout):
        assert not self.ours, "a lock is taken twice"
        if self.gone:
            raise ConnectionError
        self.ours = not self.others
        return self.ours

    def release(self):
        assert self.ours
        self.ours = False


class Turns(RuleBasedStateMachine):
    """Gangs that come, wait and leave. While one waits, others leave, it is no longer wanted, or its time is up."""

    def __init__(self):
        super().__init__()
        self.names = [f"turns-{next(_numbers)}-{name}" for name in "ab"]
        self.further = {name: [FurtherLock(), FurtherLock()] for name in self.names}
        self.inside = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gang_lock, "LOOK_SECONDS", 0.001)

    def teardown(self):
        for name in [*self.inside]:
            self.leave(name)
        self.patch.undo()

    def is_free(self, name):
        return name not in self.inside and not any(lock.others for lock in self.further[name])

    @rule(which=st.integers(0, 1), how=st.sampled_from(["at once", "not wanted", "until the others leave"]))
    def come(self, which, how):
        name, looks = self.names[which], 0

        def check():
            nonlocal looks
            looks += 1
            assert looks <= (1 if how == "at once" else 2), "it does not come to its turn"
            if how == "not wanted":
                raise Enough
            if how == "until the others leave" and looks == 2:
                if name in self.inside:
                    self.leave(name)
                for lock in self.further[name]:
                    lock.others = False

        with ExitStack() as held:
            turn = one_at_a_time(name, 0.0 if how == "at once" else None, check, *self.further[name])
            wanted = self.is_free(name) or how == "until the others leave"
            gone = any(lock.gone for lock in self.further[name])
            if not wanted or gone:
                with pytest.raises((ClusterError, Enough, ConnectionError)) as refused:
                    held.enter_context(turn)
                if not gone:
                    assert refused.type is (ClusterError if how == "at once" else Enough)
                return
            assert self.is_free(name) or looks == 0
            held.enter_context(turn)
            assert self.is_free(name)
            self.inside[name] = held.pop_all()

    def leave(self, name):
        self.inside.pop(name).close()

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 1))
    def end(self, which):
        self.leave([*self.inside][which % len(self.inside)])

    @rule(which=st.integers(0, 1), lock=st.integers(0, 1), what=st.sampled_from(["others", "gone"]))
    def beyond_this_process(self, which, lock, what):
        lock = self.further[self.names[which]][lock]
        if not lock.ours or what == "gone":
            setattr(lock, what, not getattr(lock, what))

    @invariant()
    def what_is_locked_is_in_use(self):
        for name in self.names:
            assert gang_lock._locks[name].locked() == (name in self.inside)
            assert all(lock.ours == (name in self.inside) for lock in self.further[name])


TestTurns = Turns.TestCase
TestTurns.settings = settings(stateful_step_count=20, deadline=None)


# What may happen to one call, by its weight.
EVENTS = ["end"] * 16 + ["die"] * 2 + ["leave", "refuse", "deaf", "error"]


class Call:
    def __init__(self, address, function, task, on_done):
        self.address, self.function, self.task, self.on_done = address, function, task, on_done
        self.outcome = None

    def end(self, outcome):
        if self.outcome is None:
            self.outcome = outcome
            self.on_done()

    def result(self):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


class ScriptedWorkers:
    """Workers of a gang, and what happens to them each time that the gang looks for news."""

    def __init__(self, count, draw):
        self.draw = draw
        self.there = {f"tcp://host{number % 2}:{number}": 0.0 for number in range(count)}
        self.names = itertools.count(count)
        self.calls = []
        self.shards = {}  # by address, as of its last epoch
        self.gone, self.errors, self.left, self.given_up, self.deaf = set(), [], set(), set(), set()
        self.refusals = []  # a worker that refuses a call does so to the end
        self.news = 0

    def lock(self, lock_s, check):
        return ExitStack()

    def last_heard(self):
        return dict(self.there)

    def start_on(self, address, function, *arguments, on_done):
        assert address not in self.gone, "a lost worker is asked again"
        call = Call(address, function, arguments, on_done)
        assert not [each for each in self.under_way() if each.address == address], "one call at a time on each worker"
        self.calls.append(call)
        survivors = self.shards.keys() & self.there.keys() - self.gone
        assert address in survivors or not survivors or function is run_rank, "a stranger joins the survivors"
        if function is run_rank:
            (task,) = arguments
            assert set(self.shards.get(address, ())) <= set(task.shards), "a survivor's shards are computed again"
            self.shards[address] = task.shards
        return call

    def under_way(self):
        return [call for call in self.calls if call.outcome is None]

    def tell(self, addresses, function, *arguments, wait_s=0.0):
        for address in addresses:
            if function is end_process:
                self.lose(address, replaced=True)
            elif function is give_up_rank:
                self.given_up.add((address, arguments[1]))
            else:
                assert function is leave_gang
                self.left.add(address)

    def lose(self, address, replaced):
        self.gone.add(address)
        self.there.pop(address, None)
        for call in self.under_way():
            if call.address == address:
                call.end(RankLost(f"the worker {address} is gone"))
        if replaced:
            self.there[f"tcp://host0:{next(self.names)}"] = 0.0

    def look(self):
        """One thing happens. After many, only good news: each gang comes to its end."""
        self.news += 1
        waiting = self.under_way()
        if not waiting:
            return
        call = waiting[self.draw(st.integers(0, len(waiting) - 1)) if self.news < 60 else 0]
        kind = self.draw(st.sampled_from(EVENTS)) if self.news < 60 else "end"
        kind = "refuse" if call.task in self.refusals else kind
        if kind == "die":
            self.lose(call.address, replaced=True)
        elif kind == "leave" and len(self.there) > 1:
            self.lose(call.address, replaced=False)
        elif kind == "refuse":
            if self.refusals.count(call.task) == 3:
                self.gone.add(call.address)
            self.refusals.append(call.task)
            call.end(RankLost("refused by another worker"))
        elif kind == "deaf":
            self.deaf.add(call.address)
        elif kind == "error":
            error = ValueError(f"fault {self.news}")
            self.errors.append(error)
            call.end(error if call.function is introduce else RankOutcome(error=error))
        elif call.function is introduce:
            _, epoch, _, host = call.task
            call.end(Introduction(host=host, process=1, endpoint=(host, epoch)))
        elif (call.address, call.task[0].membership.epoch) in self.given_up:
            if call.address not in self.deaf or self.news >= 60:
                call.end(RankOutcome(broken=Aborted("given up")))
        else:
            call.end(RankOutcome(value=(call.task[0].membership, call.task[0].shards)))


def never():
    raise AssertionError


@pytest.fixture(scope="module", autouse=True)
def _no_waiting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gang, "LOOK_SECONDS", 0.0)
        yield


@settings(deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(1, 9), st.sampled_from([0.0, 1e9]))
def test_a_gang_ends_with_every_shard_once_or_a_fault_of_its_own(data, count, shards, stuck_s):
    workers = ScriptedWorkers(count, data.draw)
    limits = GangLimits(stuck_s=stuck_s, wait_s=0.0, epochs=5)
    try:
        found = run_gang(workers, never, shards, limits=limits, check=workers.look)
    except (ValueError, ClusterError) as caught:
        found, error = None, caught
    assert not workers.under_way(), "a rank is left running"
    assert workers.left == {call.address for call in workers.calls} & workers.there.keys()
    if found is None:
        nobody_left = not workers.there.keys() - workers.gone
        assert error in workers.errors or "was tried 5 times" in str(error) or nobody_left
        return
    members, held = zip(*found.values, strict=True)
    assert [member.rank for member in members] == list(range(len(found.ranks)))
    assert {member.epoch for member in members} == {found.epoch}
    assert len({member.secret for member in members}) == 1
    assert sorted(itertools.chain(*held)) == list(range(shards))
    assert list(found.ranks) == sorted(found.ranks, key=lambda address: address.split(":")[1])
    assert len(set(found.lost)) == len(found.lost)
    assert set(found.lost) <= {call.address for call in workers.calls} - set(found.ranks)

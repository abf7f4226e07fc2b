"""Holds, caps, accounts and quotas in the store: who may submit and run, and what was used, over restarts and kills."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from datetime import date, timedelta

import pytest

from pipeline.api_models import State
from pipeline.errors import ParameterError
from pipeline.service.jobs import CancelRequested, Computed, Failed, LeaseLost, Planned, Published
from pipeline.service.store import Facts, JobFilter, NewJob, NoSuchJob, Store, Usage, Used
from pipeline.service.store.transaction import Transaction

DAY = 86_400.0
NOON = 20_000 * DAY + DAY / 2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "jobs.sqlite"


@pytest.fixture
def store(path):
    opened = Store(path, quota_days=30)
    yield opened
    opened.close()


def accept(store, owner="ada", group="", now=NOON, count=1, **what):
    numbers = range(count)
    new = [
        NewJob(owner=owner, group=group, workload="smooth", input="in", output=f"{owner}-{now}-{random.random()}-{n}",
               parameters={}, **what) for n in numbers
    ]  # fmt: skip
    ids = store.accept(new, now=now, most_of_an_owner=100)
    return ids[0] if count == 1 else ids


def claim(store, now=NOON, cap=100):
    claimed = store.claim("r", now=now, lease_s=30.0, owner_cap=cap)
    return None if claimed is None else claimed.job.id


def run(store, job, *, now=NOON, used=None, ends="succeeded"):
    epoch = store.job(job).job.epoch
    store.apply(job, Planned(epoch, 2), now=now)
    if ends == "failed":
        store.apply(job, Failed(epoch, "no", transient=False), now=now, facts=Facts(used=used))
        return
    store.apply(job, Computed(epoch), now=now)
    store.apply(job, Published(epoch), now=now, facts=Facts(receipt={}, used=used))


class TestHolds:
    def test_a_held_job_waits_and_its_log_names_who_held_it(self, store):
        first, second = accept(store), accept(store)
        store.hold_jobs([first], True, by="root", now=NOON)
        store.hold_jobs([first], True, by="other", now=NOON)  # it is already
        assert store.job(first).held
        assert claim(store) == second
        assert claim(store) is None
        assert json.loads(store.list_json(JobFilter(), limit=9)[0])[1]["held"] is True
        store.hold_jobs([first], False, by="root", now=NOON)
        assert claim(store) == first
        said = [event.message for event in store.events(first) if event.kind == "log"]
        assert said == ["held by root", "released by root"]

    def test_all_of_the_named_jobs_are_held_or_none(self, store):
        job = accept(store)
        with pytest.raises(NoSuchJob):
            store.hold_jobs([job, "0" * 12], True, by="root", now=NOON)
        assert not store.job(job).held

    def test_a_held_job_that_runs_goes_on_and_then_waits(self, store):
        job = accept(store)
        assert claim(store) == job
        store.hold_jobs([job], True, by="root", now=NOON)
        store.apply(job, LeaseLost(1), now=NOON)
        assert store.job(job).job.state is State.QUEUED
        assert claim(store) is None
        store.apply(job, CancelRequested(), now=NOON)
        store.hold_jobs([job], False, by="root", now=NOON)
        assert store.job(job).held, "a job that is over is left as it is"

    @pytest.mark.parametrize(
        ("holds", "claimed"),
        [
            ([], "ada bob cy"), ([("owner", "ada")], "bob cy"), ([("group", "mri")], "cy"),
            ([("group", "")], "ada bob"),
            ([("owner", "ada"), ("group", "")], "bob"), ([("owner", "nobody")], "ada bob cy"), ([("all", "")], ""),
        ],
    )  # fmt: skip
    def test_owners_groups_and_everybody_are_held_over_restarts(self, store, path, holds, claimed):
        owners = {accept(store, owner, group): owner for owner, group in (("ada", "mri"), ("bob", "mri"), ("cy", ""))}
        for kind, name in holds:
            store.hold(kind, name, by="root", now=NOON)
            store.hold(kind, name, by="second", now=NOON + 1)  # the first stays
        store.close()
        later = Store(path)
        assert [(each.kind, each.name, each.held_by, each.at) for each in later.rules(now=NOON).holds] == [
            (kind, name, "root", NOON) for kind, name in sorted(holds)
        ]
        found = [owners[job] for job in iter(lambda: claim(later), None)]
        assert found == claimed.split()
        for kind, name in holds:
            later.release(kind, name, now=NOON)
            later.release(kind, name, now=NOON)
        assert sorted(found + [owners[job] for job in iter(lambda: claim(later), None)]) == ["ada", "bob", "cy"]
        later.close()

    def test_an_owner_of_two_groups_goes_on_in_the_one_that_is_not_held(self, store):
        accept(store, "ada", "mri")
        other = accept(store, "ada", "eeg")
        store.hold("group", "mri", by="root", now=NOON)
        assert claim(store) == other
        assert claim(store) is None


class TestCaps:
    def test_running_jobs_of_an_owner(self, store):
        """The operator's cap takes the place of the setting, and one for a user that of one for each user."""
        for owner in ("ada", "bob"):
            accept(store, owner, count=5)
        store.set_cap("owner", "", "running", 3, now=NOON)
        store.set_cap("owner", "ada", "running", 1, now=NOON)
        store.set_cap("owner", "ada", "running", 2, now=NOON)
        claimed = [store.job(job).asked.owner for job in iter(lambda: claim(store, cap=1), None)]
        assert Counter(claimed) == {"ada": 2, "bob": 3}
        store.remove_cap("owner", "ada", "running", now=NOON)
        assert store.job(claim(store, cap=1)).asked.owner == "ada"
        assert claim(store, cap=1) is None
        store.remove_cap("owner", "", "running", now=NOON)
        assert claim(store, cap=3) is None
        assert claim(store, cap=4) is not None

    def test_running_jobs_of_a_group_are_counted_together(self, store):
        for owner in ("ada", "bob", "cy"):
            accept(store, owner, "mri", count=2)
        other = accept(store, "dee", "eeg")
        store.set_cap("group", "mri", "running", 2, now=NOON)
        claimed = [store.job(job).asked.group for job in iter(lambda: claim(store), None)]
        assert Counter(claimed) == {"mri": 2, "eeg": 1}
        assert store.job(other).job.state is State.PLANNING

    def test_unfinished_jobs(self, store):
        store.set_cap("owner", "ada", "unfinished", 2, now=NOON)
        store.set_cap("group", "mri", "unfinished", 3, now=NOON)
        with pytest.raises(ParameterError, match="array: 3 jobs are more than the 2 that an owner may have unfinished"):
            accept(store, "ada", count=3)
        accept(store, "ada", "mri", count=2)
        with pytest.raises(ParameterError, match="ada has 2 unfinished jobs, of 2 allowed: wait for some, or cancel"):
            accept(store, "ada", "mri")
        accept(store, "bob", "mri")
        with pytest.raises(ParameterError, match="the group mri has 3 unfinished jobs, of 3 allowed"):
            accept(store, "bob", "mri")
        accept(store, "bob", "eeg")


class TestAccounts:
    def test_what_runs_used_and_how_jobs_ended(self, store, path):
        used = Used(device_seconds=8.0, gpu_seconds=4.0, read_bytes=100, written_bytes=7)
        for owner, ends, now in (("ada", "succeeded", NOON), ("ada", "failed", NOON), ("bob", "succeeded", NOON + DAY)):
            accept(store, owner, "mri")
            run(store, claim(store), now=now, used=used, ends=ends)
        waiting = accept(store, "ada", "eeg")
        behind = accept(store, "ada", "eeg", after=frozenset({waiting}))
        store.apply(waiting, CancelRequested(), now=NOON)
        assert store.job(behind).job.state is State.FAILED
        store.close()
        later = Store(path)
        day = 20_000
        ada = Usage(day=day, owner="ada", group="mri", device_seconds=16.0, gpu_seconds=8.0, read_bytes=200,
                    written_bytes=14, runs=2, succeeded=1, failed=1)  # fmt: skip
        idle = Usage(day=day, owner="ada", group="eeg", failed=1, cancelled=1)
        bob = Usage(day=day + 1, owner="bob", group="mri", device_seconds=8.0, gpu_seconds=4.0, read_bytes=100,
                    written_bytes=7, runs=1, succeeded=1)  # fmt: skip
        assert later.usage(first=0, daily=True) == [idle, ada, bob]
        assert later.usage(first=day + 1, daily=True) == [bob]
        assert later.usage(first=0, until=day + 1, daily=True) == [idle, ada]
        assert later.usage(first=0, groups=["eeg"], daily=True) == [idle]
        assert later.usage(first=0, groups=[]) == []
        assert [each.day for each in later.usage(first=0)] == [None] * 3
        later.close()

    def test_days_are_added_up(self, store):
        for n in range(5):
            accept(store, now=NOON + n * DAY)
            used = Used(device_seconds=1.5, read_bytes=1 << 40)
            run(store, claim(store, now=NOON + n * DAY), now=NOON + n * DAY, used=used)
        (total,) = store.usage(first=0)
        assert total == Usage(
            day=None, owner="ada", group="", device_seconds=7.5, read_bytes=5 << 40, runs=5, succeeded=5
        )

    def test_a_run_is_accounted_with_its_state_or_not_at_all(self, store, monkeypatch):
        job = accept(store)
        claim(store)
        note = Transaction.note

        def killed(*_):
            raise sqlite3.OperationalError("disk I/O error")

        store.apply(job, Planned(1, 2), now=NOON)
        store.apply(job, Computed(1), now=NOON)
        monkeypatch.setattr(Transaction, "note", killed)
        facts = Facts(receipt={}, used=Used(device_seconds=9.0))
        with pytest.raises(Exception, match="disk I/O error"):
            store.apply(job, Published(1), now=NOON, facts=facts)
        assert (store.usage(first=0), store.job(job).job.state) == ([], State.PUBLISHING)
        monkeypatch.setattr(Transaction, "note", note)
        store.apply(job, Published(1), now=NOON, facts=facts)
        (found,) = store.usage(first=0)
        assert (found.device_seconds, found.runs, found.succeeded) == (9.0, 1, 1)

    def test_a_run_that_another_has_taken_over_is_accounted_too(self, store):
        job = accept(store)
        claim(store)
        store.apply(job, LeaseLost(1), now=NOON)
        claim(store)
        store.apply(job, Failed(1, "late", transient=False), now=NOON, facts=Facts(used=Used(device_seconds=2.0)))
        run(store, job, used=Used(device_seconds=3.0))
        (found,) = store.usage(first=0)
        assert (found.device_seconds, found.runs, found.succeeded) == (5.0, 2, 1)

    def test_accounts_stay_when_jobs_are_forgotten(self, store):
        accept(store)
        run(store, claim(store), used=Used(device_seconds=2.0))
        store.prune(now=NOON + 400 * DAY, keep_s=DAY)
        assert store.list_jobs() == []
        assert store.usage(first=0)[0].device_seconds == 2.0


class TestQuotas:
    def spend(self, store, owner, group, hours, day, n_bytes=0):
        accept(store, owner, group, now=NOON + day * DAY)
        used = Used(
            device_seconds=2 * hours * 3600, gpu_seconds=hours * 3600, read_bytes=n_bytes, written_bytes=n_bytes
        )
        run(store, claim(store, now=NOON + day * DAY), now=NOON + day * DAY, used=used)

    def test_a_refusal_says_when_it_frees_up(self, store):
        """10 hours on day 0 and 5 on day 3, of 12 in 30 days: the 10 are old on day 30."""
        self.spend(store, "ada", "mri", 10, 0)
        self.spend(store, "ada", "eeg", 5, 3)
        store.set_cap("owner", "ada", "gpu_hours", 12, now=NOON)
        with pytest.raises(ParameterError) as caught:
            accept(store, "ada", now=NOON + 4 * DAY)
        assert str(caught.value) == (
            "ada has used 15 GPU-hours in 30 days, of 12 GPU-hours allowed: submit again on 2024-11-03 (UTC), "
            "or ask an operator for more"
        )
        midnight = 20_030 * DAY
        with pytest.raises(ParameterError, match="2024-11-03"):
            accept(store, "ada", now=midnight - 1)
        accept(store, "ada", now=midnight)
        accept(store, "bob", "mri", now=NOON + 4 * DAY)

    @pytest.mark.parametrize(
        ("kind", "name", "what", "value", "said"),
        [
            ("owner", "ada", "device_hours", 30, "ada has used 30 device-hours in 30 days, of 30 device-hours"),
            ("owner", "", "gpu_hours", 15, "ada has used 15 GPU-hours"),
            ("group", "mri", "bytes", 2 << 30, "the group mri has used 2.0 GiB in 30 days, of 2.0 GiB allowed"),
            ("group", "", "jobs", 1, "the group mri has used 1 job in 30 days, of 1 job allowed"),
            ("owner", "ada", "jobs", 2, "ada has used 2 jobs in 30 days"),
            ("owner", "ada", "gpu_hours", 15.1, None),
            ("owner", "bob", "gpu_hours", 1, None),
            ("group", "", "gpu_hours", 11, None),
        ],
    )
    def test_of_owners_and_groups(self, store, kind, name, what, value, said):
        self.spend(store, "ada", "mri", 10, 0, 1 << 30)
        self.spend(store, "ada", "eeg", 5, 0)
        queued = accept(store, "ada", "mri", now=NOON + DAY)
        store.set_cap(kind, name, what, value, now=NOON)
        if said is None:
            accept(store, "ada", "mri", now=NOON + DAY)
            assert claim(store, now=NOON + DAY) == queued
            return
        with pytest.raises(ParameterError, match=said):
            accept(store, "ada", "mri", now=NOON + DAY)
        assert claim(store, now=NOON + DAY) is None, "jobs that were accepted before wait as well"
        assert claim(store, now=NOON + 30 * DAY) == queued

    def test_a_users_own_quota_takes_the_place_of_everybodys(self, store):
        self.spend(store, "ada", "", 10, 0)
        store.set_cap("owner", "", "gpu_hours", 1, now=NOON)
        store.set_cap("owner", "ada", "gpu_hours", 100, now=NOON)
        accept(store, "ada")
        store.remove_cap("owner", "ada", "gpu_hours", now=NOON)
        with pytest.raises(ParameterError, match="of 1 GPU-hours allowed"):
            accept(store, "ada")

    @pytest.mark.parametrize("seed", range(5))
    def test_the_day_that_is_named_is_the_first_on_which_it_is_free(self, store, seed):
        """By trying each day."""
        chance = random.Random(seed)
        days = sorted(chance.choices(range(29), k=7))
        for day in days:
            self.spend(store, "ada", "", chance.randint(1, 9), day)
        store.set_cap("owner", "ada", "gpu_hours", chance.randint(2, 12), now=NOON)
        asked = NOON + 29 * DAY
        with pytest.raises(ParameterError) as caught:
            accept(store, "ada", now=asked)
        named = str(caught.value).partition("submit again on ")[2][:10]
        for day in range(20_030, 20_060):
            try:
                accept(store, "ada", now=day * DAY)
            except ParameterError:
                continue
            assert str(date(1970, 1, 1) + timedelta(days=day)) == named
            return
        pytest.fail("it never frees up")

"""Who may submit and run: holds, caps, and quotas on the accounts of the past days."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pipeline.api_models import CapView, HoldView
from pipeline.config import format_bytes
from pipeline.errors import ParameterError, counted
from pipeline.service.store.records import DAY_S, day_of
from pipeline.service.store.transaction import Reading

Subject = Literal["owner", "group"]
HoldKind = Literal["owner", "group", "all"]
NOT_TOGETHER: Mapping[str, int] = {}
# Limits on an owner's or a group's jobs that run, and that are unfinished; the others are quotas.
RUNNING, UNFINISHED = "running", "unfinished"
# By quota: how an amount is written, and how much of it one row of the accounts has.
_SPENT: Mapping[str, Any] = {
    "gpu_hours": (lambda hours: f"{hours:.6g} GPU-hours", lambda row: row["gpu_seconds"] / 3600),
    "device_hours": (lambda hours: f"{hours:.6g} device-hours", lambda row: row["device_seconds"] / 3600),
    "bytes": (format_bytes, lambda row: row["read_bytes"] + row["written_bytes"]),
    "jobs": (lambda jobs: counted(round(jobs), "job"), lambda row: row["succeeded"] + row["failed"] + row["cancelled"]),
}


@dataclass(frozen=True)
class Blocked:
    """The owners and groups whose queued jobs wait."""

    owners: Sequence[str]
    groups: Sequence[str]


class Rules:
    """The holds and caps as they are now."""

    def __init__(self, reading: Reading, *, now: float, days: int) -> None:
        """`days`: the period of quotas, of which today is the last."""
        self._reading = reading
        self._first, self._days = day_of(now) - days + 1, days
        self.holds = [HoldView(**dict(row)) for row in reading.execute("holds")]
        self.caps = [CapView(**dict(row)) for row in reading.execute("caps")]
        self._caps = {(each.kind, each.name, each.what): each.value for each in self.caps}

    def cap(self, kind: Subject, name: str, what: str) -> float | None:
        return self._caps.get((kind, name, what), self._caps.get((kind, "", what)))

    def blocked(self, owner_cap: int, together: Mapping[str, int] = NOT_TOGETHER) -> Blocked | None:
        """The owners and groups whose jobs may not be claimed; None: no job may be claimed.

        owner_cap : how many jobs of an owner may run if no cap says otherwise; those that run together count as one
        together  : by owner, how many jobs run together with another one that counts
        """
        found: dict[str, set[str]] = {"owner": set(), "group": set()}
        for hold in self.holds:
            if hold.kind == "all":
                return None
            found[hold.kind].add(hold.name)
        active = self._reading.execute("active_by_owner").fetchall()
        spent = self._reading.execute("usage_sums", first=self._first).fetchall() if self._has_quotas() else []
        defaults: dict[Subject, float | None] = {"owner": owner_cap, "group": None}
        for kind, default in defaults.items():
            for name, count in _summed(active, kind, lambda row: row["jobs"]).items():
                most = self.cap(kind, name, RUNNING)
                if most is None and default is not None:
                    most, count = default, count - together.get(name, 0)
                if most is not None and count >= most:
                    found[kind].add(name)
            for what, (_, amount_of) in _SPENT.items():
                for name, amount in _summed(spent, kind, amount_of).items():
                    quota = self.cap(kind, name, what)
                    if quota is not None and amount >= quota:
                        found[kind].add(name)
        return Blocked(sorted(found["owner"]), sorted(found["group"]))

    def room(self, owner: str, group: str) -> float:
        """How many more jobs of theirs may run by the caps that are set, and by the quotas of jobs."""
        left = math.inf
        active = self._reading.execute("active_by_owner").fetchall()
        spent = self._reading.execute("usage_sums", first=self._first).fetchall() if self._has_quotas() else []
        whose: dict[Subject, str] = {"owner": owner, "group": group}
        for kind, name in whose.items():
            running = _summed(active, kind, lambda row: row["jobs"]).get(name, 0)
            ended = _summed(spent, kind, _SPENT["jobs"][1]).get(name, 0)
            for what, used in ((RUNNING, running), ("jobs", running + ended)):
                left = min(left, (self.cap(kind, name, what) or math.inf) - used)
        return left

    def refuse_too_many(self, owner: str, group: str, count: int, most: int | None) -> None:
        """ParameterError if the owner, or the group, may not have so many more unfinished jobs.

        most : how many an owner may have if no cap says otherwise
        """
        limits: tuple[tuple[Subject, str, float | None], ...] = (("owner", owner, most), ("group", group, None))
        for kind, name, default in limits:
            cap = self.cap(kind, name, UNFINISHED) or default
            if cap is None:
                continue
            if count > cap:  # waiting would not help
                raise ParameterError(
                    f"array: {count:,} jobs are more than the {cap:,.0f} that {'an' if kind == 'owner' else 'a'} "
                    f"{kind} may have unfinished; submit smaller arrays"
                )
            waiting = int(self._reading.execute(f"active_of_{kind}", name=name).fetchone()[0])
            if waiting + count > cap:
                raise ParameterError(
                    f"{called(kind, name)} has {counted(waiting, 'unfinished job')}, of {cap:,.0f} allowed: wait for "
                    "some, or cancel some"
                )

    def refuse_over_quota(self, owner: str, group: str) -> None:
        """ParameterError if the owner, or the group, has used up a quota; it says when some of it is free again."""
        if not self._has_quotas():
            return
        rows = self._reading.execute("usage_days", first=self._first, until=None).fetchall()
        whose: dict[Subject, str] = {"owner": owner, "group": group}
        for kind, name in whose.items():
            for what, (written, amount_of) in _SPENT.items():
                quota = self.cap(kind, name, what)
                if quota is None:
                    continue
                by_day: dict[int, float] = {}
                for row in rows:
                    if row[_COLUMN[kind]] == name:
                        by_day[row["day"]] = by_day.get(row["day"], 0.0) + amount_of(row)
                spent = sum(by_day.values())
                if spent >= quota:
                    free = datetime.fromtimestamp(self._free_on(by_day, quota) * DAY_S, UTC)
                    raise ParameterError(
                        f"{called(kind, name)} has used {written(spent)} in {counted(self._days, 'day')}, of "
                        f"{written(quota)} allowed: submit again on {free:%Y-%m-%d} (UTC), or ask an operator for more"
                    )

    def _free_on(self, by_day: Mapping[int, float], quota: float) -> int:
        """The first day on which enough of the use is `days` ago."""
        left = sum(by_day.values())
        for day in sorted(by_day):
            left -= by_day[day]
            if left < quota:
                return day + self._days
        raise AssertionError("quotas are above 0")

    def _has_quotas(self) -> bool:
        return any(each.what in _SPENT for each in self.caps)


def called(kind: Subject, name: str) -> str:
    """An owner or a group in a message."""
    return name if kind == "owner" else f"the group {name}" if name else "the group of users without one"


_COLUMN: Mapping[str, str] = {"owner": "owner", "group": "owner_group"}


def _summed(rows: Sequence[Any], kind: str, amount_of: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        name = row[_COLUMN[kind]]
        found[name] = found.get(name, 0.0) + amount_of(row)
    return found

"""Workers that are threads of this process and can be killed: a stand-in for Dask's that starts at once."""

from __future__ import annotations

import itertools
import threading
import time

from pipeline.cluster.gang import member
from pipeline.cluster.gang.gang_lock import one_at_a_time
from pipeline.errors import RankLost


class ThreadCall:
    def __init__(self, address, on_done):
        self.address = address
        self._on_done = on_done
        self._settled = threading.Lock()
        self._outcome = None

    def settle(self, outcome):
        """The first outcome counts: a killed worker's function may still come to its end."""
        with self._settled:
            if self._outcome is not None:
                return
            self._outcome = outcome
        self._on_done()

    def result(self):
        kind, value = self._outcome
        if kind == "raised":
            raise value
        return value


class ThreadWorkers:
    """As many as asked for; each killed one is replaced by another, as a nanny does."""

    _clusters = itertools.count()
    # No address is used twice: a killed worker's thread may outlive its cluster.
    _numbers = itertools.count(1)

    def __init__(self, count, *, replace=True):
        self.cluster = f"threads-{next(self._clusters)}"
        self._replace = replace
        self._lock = threading.Lock()
        self._calls = {f"thread://127.0.0.1:{next(self._numbers)}": [] for _ in range(count)}
        self.silent = {}
        self.ended = []

    def lock(self, lock_s, check):
        return one_at_a_time(self.cluster, lock_s, check)

    def last_heard(self):
        with self._lock:
            return {address: self.silent.get(address, time.monotonic()) for address in self._calls}

    def start_on(self, address, function, *args, on_done):
        call = ThreadCall(address, on_done)
        with self._lock:
            there = address in self._calls
            if there:
                self._calls[address].append(call)

        def work():
            try:
                outcome = ("returned", function(*args))
            except Exception as error:
                outcome = ("raised", error)
            if address not in self._calls:
                self._bury(address)
            call.settle(outcome)

        if there:
            threading.Thread(target=work, daemon=True).start()
        else:
            call.settle(("raised", RankLost(f"the worker {address} is gone")))
        return call

    def tell(self, addresses, function, *args, wait_s=0.0):
        for address in addresses:
            if function is member.end_process:
                self.ended.append(address)
                self.kill(address)
            elif address in self._calls:
                function(*args, address)

    def kill(self, address):
        """What others see of a killed process: its connections end, its calls do not come back."""
        with self._lock:
            calls = self._calls.pop(address, None)
            if calls is None:
                return
            if self._replace:
                self._calls[f"thread://127.0.0.1:{next(self._numbers)}"] = []
        self._bury(address)
        for call in calls:
            call.settle(("raised", RankLost(f"the worker {address} is gone")))

    def _bury(self, address):
        """The kernel closes what a dead process held."""
        with member._entering:
            part = member._parts.pop(address, None)
            if part is not None:
                part.give_up("requested")
                if not part.running:
                    part.end_epoch()

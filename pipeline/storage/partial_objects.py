"""Partial outputs in an object store, which cannot rename: chunks under their final names, metadata last.

A reader finds an array by its metadata. So chunks may be written where they belong, and metadata are kept below
`OUTPUT.partial` until `publish` puts them in their places, the root's last, by one request. An output that is there
already is never replaced, since readers would see a mixture of both.

`OUTPUT.partial/owner.json` names the run that owns the output. The owner renews it while it lives; a run that finds
another's waits for a sign of life before it takes over, and one that has lost the output stops.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from pipeline.errors import MillraceError, OutputError, StorageError
from pipeline.storage.objects import RETRY_S, ChangedError, ObjectPath, Version, version_of
from pipeline.storage.partial import Callback, Opening, no_callback, partial_path

ROOT = "zarr.json"
_MARKS = (ROOT, ".zgroup", ".zarray")
_OWNER = "owner.json"
_GONE = "was taken over or removed by another run while it was written; run the job again"
RENEWAL_S = 4.0
_LOST_AFTER_S = 15.0  # without a renewal
_CLOCKS_DIFFER_S = 600.0
_Owner = tuple[dict[str, Any], dict[str, Any]]  # its name, count of renewals …, and what `head` gives


def is_published(output: ObjectPath) -> bool:
    """Whether a result has its metadata."""
    return (output / ROOT).exists()


class PartialObjects:
    """The unfinished objects of the output `final`, with the methods of a `PartialFolder`."""

    def __init__(self, final: ObjectPath, metadata: Sequence[str], opening: Opening = Opening.NEW) -> None:
        """`metadata`: the names of objects that `publish` puts in their places, in this order, the root's last.

        OutputError if the output exists, may not be written, or another run is writing it; also if RESUME or JOIN
        finds nothing to go on with."""
        self.final, self.path, self._metadata = final, partial_objects(final), metadata
        self._live = opening is not Opening.JOIN  # owned, and neither published, kept nor discarded
        self._owner = self.path / _OWNER
        self._token, self._renewals = os.urandom(6).hex(), 0
        self._version: Version | None = None
        self._is_lost = False
        self._renewing = threading.Lock()
        self._stopping = threading.Event()
        found = self._found()
        if opening is not Opening.NEW and found is None:
            way_out = "run the job again without --resume" if self._live else "its owner is gone"
            raise OutputError(f"{self.path}: does not exist: {way_out}")
        if opening is Opening.JOIN:
            assert found is not None
            self._token = found[0]["run"]
            return
        self._refuse_published()
        if found is None and opening is Opening.NEW:
            self._refuse_foreign()
        self._take_over(found)
        if found is not None and opening is Opening.NEW:
            final.remove_below(ROOT)
        threading.Thread(target=self._renew_regularly, name="output-owner", daemon=True).start()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Guards writing. OutputError if another run owns the output now."""
        self._refuse_lost()
        yield
        self._refuse_lost()

    def put(self, name: str, buffers: Sequence[Any]) -> None:
        """Write an object, all or nothing: metadata aside until they are published, chunks in their places."""
        self._refuse_lost()
        with _kept():
            self._place(name).put(buffers)

    def read(self, name: str) -> bytes:
        """The bytes of an object that was `put`."""
        return self._place(name).read_bytes()

    def change(self, name: str, make: Callable[[bytes | None], Sequence[Any]]) -> None:
        """Write an object made from its older bytes (None: there is none), which no other process changes meanwhile."""
        path, until = self._place(name), time.monotonic() + RETRY_S
        while True:
            self._refuse_lost()
            try:
                data, meta = path.get()
                older, version = bytes(data), version_of(meta)
            except FileNotFoundError:
                older, version = None, None
            try:
                with _kept():
                    path.put(make(older), replaces=version, new=older is None)
                return
            except ChangedError as error:
                if time.monotonic() > until:
                    raise StorageError(f"{path}: other workers change it without end; run again") from error

    def flush(self) -> None:
        """Objects are durable once they are written; checks that the output is still this run's."""
        if self._live:
            self._renew()
        elif (found := self._found()) is None or found[0]["run"] != self._token:
            self._is_lost = True
        self._refuse_lost()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        """Call `on_sealed`, then put the metadata in their places, the root's last and only if there is none."""
        if not self._live:
            raise ValueError(f"{self.final}: already published or discarded, or owned by another process")
        self.flush()
        contents = {name: self.read(name) for name in self._metadata}
        self._refuse_published()
        on_sealed()
        for name, content in contents.items():
            place, is_root = self.final / name, name == ROOT
            try:
                place.put([content], new=is_root)
            except ChangedError as error:
                if place.read_bytes() != content:  # else by a request of ours whose answer was lost
                    raise OutputError(f"{self.final}: another run has published it; choose another name") from error
        self._stop()
        with suppress(MillraceError):
            self.path.remove_below()

    def keep(self) -> None:
        """Leave everything for RESUME, at once. Harmless after `publish` or `discard`."""
        if self._live:
            self._stop()
            with suppress(MillraceError, ChangedError):
                self._put_owner(is_released=True)

    def discard(self) -> None:
        """Remove what was written, if the server lets us; harmless after `publish` or a second time."""
        if not self._live:
            return
        with suppress(MillraceError):
            self._renew()
            # It is published if the answer to the last request of `publish` was lost.
            if not self._is_lost and not is_published(self.final):
                self.final.remove_below(ROOT)
                self.path.remove_below()
        self._stop()

    def _stop(self) -> None:
        self._live = False
        self._stopping.set()

    def _place(self, name: str) -> ObjectPath:
        return (self.path if name in self._metadata else self.final) / name

    # The owner

    def _found(self) -> _Owner | None:
        """None if there is none."""
        try:
            data, meta = self._owner.get(1 << 12)
            found = json.loads(bytes(data))
            return {name: found[name] for name in ("run", "renewals", "released")}, meta
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{self._owner}: is in the way and not ours; remove it") from error

    def _take_over(self, found: _Owner | None) -> None:
        if found is not None and not found[0]["released"]:
            self._wait_for_sign_of_life(found)
        try:
            self._version = None if found is None else version_of(found[1])
            self._put_owner(is_new=found is None)
        except ChangedError as error:
            raise self._in_other_hands() from error

    def _wait_for_sign_of_life(self, found: _Owner) -> None:
        if (datetime.now(UTC) - found[1]["last_modified"]).total_seconds() > _CLOCKS_DIFFER_S:
            return
        until = time.monotonic() + _LOST_AFTER_S
        while time.monotonic() < until:
            time.sleep(min(0.5, _LOST_AFTER_S / 4))
            now = self._found()
            if now is not None and now[0] != found[0]:
                raise self._in_other_hands()

    def _in_other_hands(self) -> OutputError:
        return OutputError(
            f"{self.path}: another run is writing this output; wait for it, stop it, or choose another name"
        )

    def _put_owner(self, *, is_new: bool = False, is_released: bool = False) -> None:
        with self._renewing:
            self._renewals += 1
            content = {"run": self._token, "renewals": self._renewals, "released": is_released}
            self._version = self._owner.put([json.dumps(content).encode()], new=is_new, replaces=self._version)

    def _renew(self) -> None:
        if self._is_lost:
            return
        try:
            self._put_owner()
        except ChangedError:
            found = self._found()
            if found is None or found[0]["run"] != self._token:
                self._is_lost = True
            else:  # a request of ours succeeded although its answer was lost
                self._version = version_of(found[1])

    def _renew_regularly(self) -> None:
        while not self._is_lost and not self._stopping.wait(RENEWAL_S):
            with suppress(MillraceError):  # tried again; a longer failure stops the writers too
                self._renew()

    def _refuse_lost(self) -> None:
        if self._is_lost:
            raise OutputError(f"{self.path}: {_GONE}")

    # What is there

    def _refuse_published(self) -> None:
        for mark in _MARKS:
            if (self.final / mark).exists():
                raise OutputError(
                    f"{self.final}: exists, and objects are not replaced while others may read them; remove it, or "
                    "choose another name"
                )

    def _refuse_foreign(self) -> None:
        if self.final.lists and next(self.final.iterdir(), None) is not None:
            raise OutputError(f"{self.final}: objects that are not a result are in the way; choose another name")


@contextmanager
def _kept() -> Iterator[None]:
    """What has been written is kept if a chunk is refused: credentials may be given back."""
    try:
        yield
    except OutputError as error:
        raise StorageError(str(error)) from error


def partial_objects(final: ObjectPath) -> ObjectPath:
    """Where an unfinished output's metadata and owner are."""
    found = partial_path(final)
    assert isinstance(found, ObjectPath), "with_name keeps the type"
    return found

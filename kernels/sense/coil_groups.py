"""Groups of coils, for volumes whose maps exceed the device's memory.

A volume's maps are split into groups of coils. On a CPU a group is a view. On a GPU the groups that fit stay; in each
pass over the coils the others are copied from pinned host memory on a separate stream into two alternating buffers,
one group ahead of the computation, also across the end of a pass. Alternatively they are recomputed in each pass. The
computation and the order of the groups do not depend on where they are, so neither do the result's bits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import namespace

# Values of a group's coil images: 1 GiB.
GROUP_VALUES = 1 << 27
# More groups shorten the wait for the first; each keeps enough coils for the cores to share.
_GROUPS, _FEWEST_COILS = 8, 4
_PLACES = 2


def group_parts(coils: int, pixels: int) -> list[slice]:
    """The groups of a volume's coils."""
    count = max(1, min(GROUP_VALUES // pixels, max(-(-coils // _GROUPS), _FEWEST_COILS)))
    return [slice(first, min(first + count, coils)) for first in range(0, coils, count)]


def parts_of(maps: Any) -> list[slice]:
    """The groups of coils of `GroupedMaps`, or of an array (coils, *shape), which is one group if it is small."""
    if isinstance(maps, GroupedMaps):
        return list(maps.parts)
    count = max(1, GROUP_VALUES // math.prod(maps.shape[1:]))
    return [slice(first, min(first + count, len(maps))) for first in range(0, len(maps), count)]


def groups_of(maps: Any) -> Iterator[tuple[slice, Any]]:
    """Each group's coils and maps (coils of the group, *shape), valid on the device until the next iteration."""
    if isinstance(maps, GroupedMaps):
        yield from maps.groups()
    else:
        yield from ((part, maps[part]) for part in parts_of(maps))


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Which groups of maps stay on the device.

    groups, resident : number of groups, and the indices of those on the device
    nbytes, streamed : bytes of all maps, and of those copied from the host in each pass
    room             : bytes on the device available for maps; None for unlimited
    """

    groups: int
    resident: frozenset[int]
    nbytes: int
    streamed: int
    room: int | None


def plan_residency(coils: int, shape: Sequence[int], room: int | None) -> Residency:
    """Keeps as many groups on the device as fit into `room` bytes. ValueError if there is no room for two buffers."""
    pixels = math.prod(shape)
    parts = group_parts(coils, pixels)
    a_coil = pixels * np.dtype(np.complex64).itemsize
    a_group = (parts[0].stop - parts[0].start) * a_coil
    count = len(parts) if room is None or coils * a_coil <= room else room // a_group - _PLACES
    if count < 0:
        raise ValueError(f"the GPU has {room} bytes for coils, of which {_PLACES} groups take {_PLACES * a_group}")
    # Spread evenly among the streamed groups, which leaves each more time for its copy.
    resident = (
        frozenset(range(len(parts)))
        if count >= len(parts)
        else frozenset(len(parts) * n // count for n in range(count))
    )
    streamed = sum((part.stop - part.start) * a_coil for n, part in enumerate(parts) if n not in resident)
    return Residency(groups=len(parts), resident=resident, nbytes=coils * a_coil, streamed=streamed, room=room)


class GroupedMaps:
    """Maps (coils, *shape), complex64, on the device a group at a time, or all at once.

    `close` frees the device's memory; do not call it during a pass.
    """

    def __init__(
        self, like: Any, coils: int, shape: Sequence[int], residency: Residency, *, made_again: bool = False
    ) -> None:
        """like: any array of the device, NumPy's or CuPy's. made_again: recompute the other groups in each pass."""
        self._xp = namespace(like)
        self._made_again = made_again
        self._again: Callable[[slice], Any] | None = None
        self.parts = group_parts(coils, math.prod(shape))
        self.residency = residency
        self._groups: list[Any] = [None] * len(self.parts)
        self._streamed = [number for number in range(len(self.parts)) if number not in residency.resident]
        self._upload: _Upload | None = None

    def make(self, made: Callable[[slice], Any], add: Callable[[Any], Any], mask: Any = None) -> None:
        """Computes every group's maps, scaled so that the sum of their squares over all coils is 1.

        made : computes the maps of some coils on the device; called twice, so that only one group is held at a time
        add  : sums a real (*shape) array over the ranks that hold other coils
        mask : bool (*shape), outside of which maps are 0; or None
        """
        squares: Any = 0
        for part in self.parts:
            maps = made(part)
            squares = squares + self._xp.sum(maps.real**2 + maps.imag**2, axis=0)
        scale = unit_scale(add(squares))
        if mask is not None:
            scale = scale * mask

        def scaled(part: slice) -> Any:
            return (made(part) * scale).astype(np.complex64, copy=False)

        self._again = scaled
        for number, part in enumerate(self.parts):
            if number in self.residency.resident or not self._made_again:
                self._put(number, scaled(part))

    def _put(self, number: int, maps: Any) -> None:
        """Keeps a group's maps on the device or the host."""
        if number in self.residency.resident or self._xp is np:
            self._groups[number] = maps
        else:
            held = pinned(self._xp, maps.shape)
            maps.get(out=held)
            self._groups[number] = held

    def groups(self) -> Iterator[tuple[slice, Any]]:
        """A pass over all groups, in order. A group's maps are valid until the next iteration."""
        for number, part in enumerate(self.parts):
            if self._groups[number] is None:
                assert self._again is not None, "make comes before groups"
                yield part, self._again(part)
            elif number in self.residency.resident or self._xp is np:
                yield part, self._groups[number]
            else:
                if self._upload is None:
                    hosts = [self._groups[each] for each in self._streamed]
                    self._upload = _Upload(self._xp, hosts)
                with self._upload.next() as maps:
                    yield part, maps

    def close(self) -> None:
        if self._upload is not None:
            self._upload.close()
        self._groups, self._again = [], None


class _Upload:
    """Copies host arrays to the device one after another, once or in a loop, into two alternating buffers."""

    def __init__(self, xp: Any, hosts: Sequence[NDArray[Any]], *, once: bool = False) -> None:
        self._xp, self._hosts, self._once = xp, hosts, once
        self._places = [xp.empty(hosts[0].shape, hosts[0].dtype) for _ in range(_PLACES)]
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._arrived = [xp.cuda.Event(disable_timing=True) for _ in range(_PLACES)]
        self._used = [xp.cuda.Event(disable_timing=True) for _ in range(_PLACES)]
        self._coming: deque[tuple[int, int]] = deque()
        self._following = 0
        for place in range(_PLACES):
            self._used[place].record(self._current())  # work queued so far may still use this memory
            self._fetch(place)

    def _fetch(self, place: int) -> None:
        if self._once and self._following >= len(self._hosts):
            return
        number = self._following % len(self._hosts)
        self._following += 1
        host = self._hosts[number]
        self._stream.wait_event(self._used[place])
        self._places[place].data.copy_from_host_async(host.ctypes.data, host.nbytes, self._stream)
        self._arrived[place].record(self._stream)
        self._coming.append((number, place))

    def next(self) -> _Stay:
        number, place = self._coming.popleft()
        self._current().wait_event(self._arrived[place])
        return _Stay(self, place, self._places[place][: len(self._hosts[number])])

    def leave(self, place: int) -> None:
        """The work on a buffer has been queued: fetch the array after the next into it."""
        self._used[place].record(self._current())
        self._fetch(place)

    def _current(self) -> Any:
        return self._xp.cuda.get_current_stream()

    def close(self) -> None:
        self._stream.synchronize()
        self._places = []


class _Stay:
    """An array in its buffer, valid inside the context."""

    def __init__(self, upload: _Upload, place: int, array: Any) -> None:
        self._upload, self._place, self._array = upload, place, array

    def __enter__(self) -> Any:
        return self._array

    def __exit__(self, *_: object) -> None:
        self._upload.leave(self._place)


def streamed(xp: Any, hosts: Sequence[NDArray[Any]]) -> Iterator[Any]:
    """Host arrays on the device, one after another, each valid until the next iteration and copied during the one
    before. On a CPU they are returned as they are. Pinned arrays copy faster; none may be longer than the first."""
    if xp is np:
        yield from hosts
        return
    upload = _Upload(xp, hosts, once=True)
    try:
        for _ in hosts:
            with upload.next() as array:
                yield array
    finally:
        upload.close()


def pinned(xp: Any, shape: Sequence[int], dtype: Any = np.complex64) -> NDArray[Any]:
    """An array in pinned host memory of exactly this size; CuPy's pool would round up."""
    if xp is np:
        return np.empty(shape, dtype)
    count = math.prod(shape)
    memory = xp.cuda.PinnedMemory(max(count, 1) * np.dtype(dtype).itemsize)
    return np.frombuffer(xp.cuda.PinnedMemoryPointer(memory, 0), dtype, count).reshape(shape)


def unit_scale(squares: Any) -> Any:
    """1 / √squares, and 0 at zeros."""
    xp = namespace(squares)
    size = xp.sqrt(squares)
    smallest = np.float32(np.finfo(np.float32).tiny)
    return xp.where(size > smallest, np.float32(1), np.float32(0)) / xp.maximum(size, smallest)

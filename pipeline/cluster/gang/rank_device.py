"""A rank's device as shared jobs see it: arrays in pairs on host and device, and the timing of their stages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cluster.gang.member import Member
from pipeline.engine.devices import cuda_driver
from pipeline.engine.devices.buffers import CudaSlot, buffer_bytes, carve
from pipeline.engine.devices.device import Device
from pipeline.engine.stages import StageRecord
from pipeline.formats.image.base import Region
from pipeline.workloads import Chunk
from pipeline.workloads.gang_protocols import Room
from pipeline.workloads.protocol import ArraySpec


class RankDevice:
    """Implements `pipeline.workloads.gang_protocols.Rank`; `record`: the totals of this rank's stages."""

    def __init__(self, device: Device, member: Member) -> None:
        self._device = device
        self._member = member
        self.record = StageRecord()
        self.threads = device.lanes
        self.like: Any = self.room([ArraySpec((1,), np.dtype(np.float32))]).device[0]

    def room(self, specs: Sequence[ArraySpec]) -> Room:
        slot = self._device.allocate(buffer_bytes(specs), 0)
        host = carve(slot.host_input, specs)
        return HostRoom(host, self.record) if slot.cuda is None else DeviceRoom(host, slot.cuda, specs, self.record)

    def enter(self) -> None:
        self._device.enter()

    def check(self) -> None:
        self._member.check()

    def note_read(self, seconds: float, nbytes: int) -> None:
        now = time.perf_counter()
        self.record.add("read", 0, now - seconds, now, nbytes)


class HostRoom:
    """Arrays that the CPU computes in place."""

    def __init__(self, arrays: Sequence[NDArray[Any]], record: StageRecord) -> None:
        self.host = self.device = arrays
        self._nbytes = sum(array.nbytes for array in arrays)
        self._record = record
        self._uploaded = 0.0

    def upload(self) -> None:
        self._uploaded = time.perf_counter()
        self._record.add("upload", 0, self._uploaded, self._uploaded, self._nbytes)

    def computed(self) -> None:
        self._record.add("compute", 0, self._uploaded, time.perf_counter(), self._nbytes)

    def wait(self) -> None:
        """The CPU computes synchronously."""


class DeviceRoom:
    """Pinned arrays and their twins on a GPU, whose events time the stages."""

    def __init__(
        self, host: Sequence[NDArray[Any]], twin: CudaSlot, specs: Sequence[ArraySpec], record: StageRecord
    ) -> None:
        whole = Region((0,), (1,))
        chunk = Chunk(index=0, region=whole, halo=((0, 0),), inputs=tuple(specs), outputs=(), work=0)
        self.host = host
        self.device: Sequence[Any] = twin.inputs(chunk)
        self._twin = twin
        self._nbytes = sum(array.nbytes for array in host)
        self._record = record
        self._under_way: list[tuple[str, Any, Any]] = []

    def upload(self) -> None:
        self._twin.upload_began.record()
        for host, device in zip(self.host, self.device, strict=True):
            device.set(host)
        self._twin.upload_done.record()
        self._under_way.append(("upload", self._twin.upload_began, self._twin.upload_done))

    def computed(self) -> None:
        self._twin.compute_done.record()
        self._under_way.append(("compute", self._twin.upload_done, self._twin.compute_done))

    def wait(self) -> None:
        for stage, began, done in self._under_way:
            done.synchronize()
            now = time.perf_counter()
            self._record.add(stage, 0, now - cuda_driver.seconds(began, done), now, self._nbytes)
        self._under_way = []

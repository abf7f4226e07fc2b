"""Workloads whose output is one image, map or series: how it is made durable, published, kept or removed."""

from __future__ import annotations

from abc import abstractmethod

from pipeline.formats.base import ImageWriter
from pipeline.workloads.base import Workload


class OneOutput(Workload):
    """`start` sets `_writer`; until then there is no output."""

    _writer: ImageWriter | None = None

    @property
    def _output(self) -> ImageWriter:
        assert self._writer is not None, "start comes before this"
        return self._writer

    @abstractmethod
    def _close_input(self) -> None: ...

    def flush(self) -> None:
        self._output.flush()

    def publish(self) -> None:
        self._output.publish()

    def keep(self) -> None:
        if self._writer is not None:
            self._writer.keep()
        self._close_input()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._close_input()

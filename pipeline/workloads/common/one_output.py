"""Workloads whose output is one image, map or series: how it is made durable, published, kept or removed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from pipeline import stopping
from pipeline.formats.image.base import ImageWriter
from pipeline.storage.partial import Callback, no_callback
from pipeline.workloads.base import Workload


class OneOutput(Workload):
    """`start` calls `_open_output`; until then there is none."""

    _writer: ImageWriter | None = None

    def _open_output(self, create: Callable[[], ImageWriter]) -> None:
        with stopping.held():  # a file that nobody knows of would stay
            self._writer = create()

    @property
    def _output(self) -> ImageWriter:
        assert self._writer is not None, "start comes before this"
        return self._writer

    @abstractmethod
    def _close_input(self) -> None: ...

    def flush(self) -> None:
        self._output.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        self._output.publish(on_sealed)

    def keep(self) -> None:
        if self._writer is not None:
            self._writer.keep()
        self._close_input()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._close_input()

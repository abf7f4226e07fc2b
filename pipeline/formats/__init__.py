"""File formats, one folder for each kind of content."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self


class Reader(ABC):
    """A file open for reading, closed at the end of a `with` block."""

    path: Path

    @abstractmethod
    def close(self) -> None:
        """Harmless a second time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

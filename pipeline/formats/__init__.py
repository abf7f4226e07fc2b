"""File formats, one folder for each kind of content."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline.errors import OutputError


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


def unsupported_output(path: Path, kind: str, suffixes: Sequence[str]) -> OutputError:
    """The error of an output whose name selects no format of this kind."""
    if not path.suffix and path.is_dir():
        return OutputError(f"{path}: is a folder; name a file in it, such as {path / f'result{suffixes[0]}'}")
    fault = f"unsupported {kind} {path.suffix}" if path.suffix else "the name has no suffix"
    return OutputError(f"{path}: {fault}; end it with {', '.join(suffixes)}")

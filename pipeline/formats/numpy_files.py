"""NumPy's `.npy` and `.npz` files; pickled objects are never loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, MillraceError
from pipeline.storage.confinement import by_descriptor, open_beneath
from pipeline.storage.positional import first_bytes, reading

LONGEST_DETAIL = 120


def is_archive(path: Path) -> bool:
    """Whether the file is an `.npz`. InputError if it cannot be read."""
    return first_bytes(path, 2) == b"PK"


def mapped_array(path: Path) -> NDArray[Any]:
    """The array of an `.npy`, mapped: a header that declares more than the file holds allocates no memory."""
    first_bytes(path)  # names the error in a path
    with _loading(path, ".npy"), by_descriptor(path) as here:
        return np.lib.format.open_memmap(here, mode="r")


@contextmanager
def archive(path: Path) -> Iterator[Any]:
    """The `np.load` of an `.npz`, with errors in the file translated to InputError."""
    with (
        _loading(path, ".npz"),
        open(path, "rb", opener=open_beneath) as opened,
        np.load(opened, allow_pickle=False) as found,
    ):
        yield found


@contextmanager
def _loading(path: Path, suffix: str) -> Iterator[None]:
    try:
        with reading(path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy evaluates a header's text, which may be damaged or old
            yield
    except MillraceError:
        raise
    except MemoryError as exc:
        raise InputError(f"{path}: declares more numbers than memory holds; save it again") from exc
    except Exception as exc:  # any error from evaluating a damaged header or inflating a damaged archive
        said = " ".join(str(exc).split())
        detail = f" ({said})" if 0 < len(said) <= LONGEST_DETAIL and "pickle" not in said else ""
        raise InputError(f"{path}: not an {suffix} file of plain numbers, or damaged{detail}; save it again") from exc

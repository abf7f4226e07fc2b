"""Everything Millrace raises on purpose.

MillraceError                 ours to answer for: exit code 1
├── StorageError              the disk or the network failed under us (full, read-only, vanished)
├── DeviceError               a GPU failed, or the CUDA toolkit under it
│   └── OutOfDeviceMemory     the chunk did not fit; the engine halves it and tries again
├── ClusterError              workers died too often, or the scheduler went away
│   └── CommunicatorError     the ranks of a gang did not come to a collective's end; the communicator is of no more use
│       ├── RankLost          a rank's process or host is gone
│       ├── DeadlineExceeded  a rank did not come to the collective, or did not finish it, in time
│       └── Aborted           another rank or the service gave up
├── ServiceError              the service does not answer, or failed
├── AuditError                a result was checked and found wrong
├── ResultError               a published result is not what its job computes: exit code 6
└── UserError                 the user can mend it: exit code 2
    ├── InputError            a file is missing, truncated, lies, or holds what we cannot take
    ├── OutputError           the result cannot be written there or in that format
    ├── ParameterError        a parameter is wrong or does not fit the input
    ├── DeviceUnavailable     the device asked for is not on this machine
    └── ServiceRefused        the service says no: to the request, the token or the job's state

Every message is one line: what is wrong, where (file, record or parameter), and the way out.
"""

from __future__ import annotations

import errno
import math
import resource

# What the system says where the disk is at fault, and not whoever named a place on it.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def printable(text: str) -> str:
    """Text for a terminal, on which no file's name may act: line breaks, escapes and such as backslash sequences."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def too_many_files(error: BaseException) -> str | None:
    """The way out where an error says that a process, or the system, has as many files open as it may; else None."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may have {most:,} files open: raise the limit (ulimit -n), then run again"
    if code == errno.ENFILE:
        return "the system has as many files open as it may: raise fs.file-max or close programs, then run again"
    return None


def shortage(error: BaseException) -> str | None:
    """The line where an error says that the system gives a process no more files or memory; else None."""
    way_out = too_many_files(error)
    return too_little_memory(error) if way_out is None else f"{error}; {way_out}"


def too_little_memory(error: BaseException) -> str | None:
    """The line where an error, or what it came of, says that the system gives a process no more memory; else None."""
    said: BaseException | None = error
    while said is not None:
        if isinstance(said, MemoryError) or getattr(said, "errno", None) == errno.ENOMEM or _says_no_memory(str(said)):
            return (
                f"too little memory ({str(said) or type(said).__name__}): lower --memory, end other programs, "
                "or raise the limits (ulimit -v and -u, a container's), then run again"
            )
        said = said.__cause__ or said.__context__
    return None


def _says_no_memory(text: str) -> bool:
    """What the dynamic linker, the interpreter and libraries say of it in words alone."""
    return any(words in text for words in ("failed to map segment", "can't start new thread", "Cannot allocate memory"))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: 1 chunk, 2,000 chunks; 1 axis, 3 axes (`plural`, where it does not just add an s)."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


class MillraceError(Exception):
    """Something failed that is not the user's mistake."""

    exit_code = 1


class StorageError(MillraceError):
    """The file system failed: no space, an I/O error, a file that vanished."""


class DeviceError(MillraceError):
    """A GPU, its driver or the CUDA toolkit failed."""


class OutOfDeviceMemory(DeviceError):
    """A chunk did not fit the device's memory."""


class ClusterError(MillraceError):
    """The Dask cluster failed under a job."""


class CommunicatorError(ClusterError):
    """A collective did not come to its end, or its ranks disagree about it."""


class RankLost(CommunicatorError):
    """The process of a rank, or the way to it, is gone."""


class DeadlineExceeded(CommunicatorError):
    """A collective was not finished in its time."""


class Aborted(CommunicatorError):
    """Another rank or the service gave the communicator up."""


class ServiceError(MillraceError):
    """The service does not answer, or failed at a request."""


class AuditError(MillraceError):
    """A result was checked and found wrong.

    worst_error, tolerance : what was found and what had been tolerated, in the workload's unit; not finite where the
                             result was not
    """

    def __init__(self, message: str, *, worst_error: float = math.inf, tolerance: float = 1.0) -> None:
        super().__init__(message)
        self.worst_error = worst_error
        self.tolerance = tolerance


class ResultError(MillraceError):
    """A published result differs from what is computed again, or cannot be read."""

    exit_code = 6


class UserError(MillraceError):
    """The user can mend this."""

    exit_code = 2


class InputError(UserError):
    """An input file cannot be used as it is."""


class OutputError(UserError):
    """The result cannot be written there, or not in that format."""


class ParameterError(UserError):
    """A parameter is wrong, or does not fit the input."""


class DeviceUnavailable(UserError):
    """The device asked for cannot be used on this machine."""


class ServiceRefused(UserError):
    """The service refused a request; the message is its own."""

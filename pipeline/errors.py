"""The exceptions that Millrace raises on purpose.

MillraceError                 not the user's mistake: exit code 1
├── StorageError              the disk or the network failed (full, read-only, vanished)
├── DeviceError               a GPU or its CUDA toolkit failed
│   └── OutOfDeviceMemory     the chunk did not fit; the engine halves it and tries again
├── ClusterError              workers died too often, or the scheduler cannot be reached
│   └── CommunicatorError     a collective did not finish; the communicator can no longer be used
│       ├── RankLost          a rank's process or host is gone
│       ├── DeadlineExceeded  a rank did not join or finish the collective in time
│       └── Aborted           another rank or the service gave up
├── OperatorError             somebody's own function failed, or killed its workers
├── LimitExceeded             a service's job took more than it may
├── Crowded                   a job makes room for another on its workers, and goes on later
├── ServiceError              the service does not answer, or failed
├── AuditError                a result was checked and found wrong
├── ResultError               a published result is not what its job computes: exit code 6
└── UserError                 the user can correct it: exit code 2
    ├── InputError            a file is missing, truncated, inconsistent or unsupported
    ├── OutputError           the result cannot be written there or in that format
    ├── ParameterError        a parameter is wrong or does not fit the input
    │   └── MemoryTooSmall    --memory does not hold the smallest chunk
    ├── DeviceUnavailable     the device asked for is not on this machine
    └── ServiceRefused        the service refuses the request, the token or the job's state

Every message is one line: what is wrong, where (file, record or parameter), and what to do.
"""

from __future__ import annotations

import errno
import math
import resource

# Codes that blame the disk, not the path that the user chose.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def printable(text: str) -> str:
    """Text that is safe on a terminal: line breaks, escapes and other control characters as backslash sequences."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def too_many_files(error: BaseException) -> str | None:
    """What to do if the error is a limit on open files, of the process or the system; else None."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may have {most:,} files open: raise the limit (ulimit -n), then run again"
    if code == errno.ENFILE:
        return "the system has as many files open as it may: raise fs.file-max or close programs, then run again"
    return None


def shortage(error: BaseException) -> str | None:
    """A message if the system refused the process files or memory; else None."""
    way_out = too_many_files(error)
    return too_little_memory(error) if way_out is None else f"{error}; {way_out}"


def too_little_memory(error: BaseException) -> str | None:
    """A message if the error, or one of its causes, is a lack of memory; else None."""
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
    """The wording of the dynamic linker, the interpreter and libraries, which raise no specific type."""
    return any(words in text for words in ("failed to map segment", "can't start new thread", "Cannot allocate memory"))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: 1 chunk, 2,000 chunks; 1 axis, 3 axes (`plural`, unless it just adds an s)."""
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
    """A collective did not finish, or its ranks disagree about it."""


class RankLost(CommunicatorError):
    """The process of a rank, or the connection to it, is gone."""


class DeadlineExceeded(CommunicatorError):
    """A collective did not finish in time."""


class Aborted(CommunicatorError):
    """Another rank or the service gave the communicator up."""


class OperatorError(MillraceError):
    """An operator's function failed; its job is not tried again.

    trace : the function's traceback, for logs; may be empty
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class LimitExceeded(MillraceError):
    """A job took more than its limits allow; its finished chunks are kept for another one."""


class Crowded(MillraceError):
    """Jobs that share workers take too much memory together: this one makes room, and goes on later."""


class ServiceError(MillraceError):
    """The service does not answer, or failed at a request."""


class AuditError(MillraceError):
    """A result was checked and found wrong.

    worst_error, tolerance : in the workload's unit; not finite if the result is not
    """

    def __init__(self, message: str, *, worst_error: float = math.inf, tolerance: float = 1.0) -> None:
        super().__init__(message)
        self.worst_error = worst_error
        self.tolerance = tolerance


class ResultError(MillraceError):
    """A published result differs from what is computed again, or cannot be read."""

    exit_code = 6


class UserError(MillraceError):
    """The user can correct this."""

    exit_code = 2


class InputError(UserError):
    """An input file cannot be used as it is."""


class OutputError(UserError):
    """The result cannot be written there, or not in that format."""


class ParameterError(UserError):
    """A parameter is wrong, or does not fit the input."""


class MemoryTooSmall(ParameterError):
    """--memory does not hold the smallest chunk.

    times : how many times as much does
    """

    def __init__(self, fault: str, times: float) -> None:
        super().__init__(fault, times)
        self.fault, self.times = fault, times

    def __str__(self) -> str:
        return f"{self.fault}: raise it to {self.times:g} times as much"


class DeviceUnavailable(UserError):
    """The device asked for cannot be used on this machine."""


class ServiceRefused(UserError):
    """The service refused a request; the message comes from the service."""

"""Jobs that the ranks of a gang share: sums over many parts of the input, or chunks that all compute together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import NDArray

from kernels.runtime.threads import check_wanted
from pipeline.formats.image.base import Region
from pipeline.workloads.protocol import ArraySpec, Chunk, JobSpec, OpenJob


class Room(Protocol):
    """Arrays on the host and their copies on a rank's device; on a CPU both are the same arrays."""

    @property
    def host(self) -> Sequence[NDArray[Any]]: ...

    @property
    def device(self) -> Sequence[Any]: ...

    def upload(self) -> None:
        """Copy the host's arrays to the device, in stream order."""

    def computed(self) -> None:
        """Mark the end of the work launched on these arrays since the upload; timed for the receipt."""

    def wait(self) -> None:
        """Wait until that work is done and the host's arrays may be filled again."""


class Rank(Protocol):
    """One rank of a gang, as a job sees it: its device, and whether to continue."""

    threads: int  # number that compute on a CPU
    like: Any  # a NumPy or CuPy array on the device

    def room(self, specs: Sequence[ArraySpec]) -> Room:
        """Allocate arrays on the host (pinned, for a GPU) and on the device."""

    def enter(self) -> None:
        """Prepare the calling thread for the device."""

    def check(self) -> None:
        """Raises CommunicatorError if the other ranks have given up."""

    def note_read(self, seconds: float, nbytes: int) -> None:
        """Add time spent on reading to the receipt. From any thread."""


class Collectives(Protocol):
    """The part of `pipeline.cluster.communicators.base.Communicator` that jobs use; all ranks call each at once."""

    def allreduce(self, array: Any, /) -> Any: ...

    def allgather(self, array: Any, /) -> Any: ...

    def broadcast(self, array: Any, /, *, root: int = 0) -> Any: ...

    def confirm(self) -> None: ...


class Peers(Protocol):
    """The ranks of a gang, as one of them sees them: `pipeline.cluster.gang.member.Member`."""

    rank: int
    size: int
    shards: tuple[int, ...]  # the parts that this rank computes
    partials: dict[int, Any]  # their results, kept for a retry if a rank is lost

    @property
    def communicator(self) -> Collectives:
        """For the device's arrays."""

    @property
    def control(self) -> Collectives:
        """For the host's arrays."""

    def check(self) -> None:
        """Raises CommunicatorError if the other ranks have given up."""


class Alone:
    """A single rank: `Peers` without others."""

    def __init__(self, shards: int) -> None:
        self.rank, self.size = 0, 1
        self.shards = tuple(range(shards))
        self.partials: dict[int, Any] = {}

    @property
    def communicator(self) -> Alone:
        return self

    @property
    def control(self) -> Alone:
        return self

    def check(self) -> None:
        """One rank has no peers; checks cancellation only."""
        check_wanted()

    def confirm(self) -> None:
        """One rank's sum is always complete."""

    def allreduce(self, array: Any, /) -> Any:
        return array

    def allgather(self, array: Any, /) -> Any:
        return array[None]

    def broadcast(self, array: Any, /, *, root: int = 0) -> Any:
        return array


@runtime_checkable
class JointJob(OpenJob, Protocol):
    """A job whose ranks can compute each chunk together, with all-reduces."""

    def joint_parts(self, chunks: Sequence[Chunk], ranks: int) -> int:
        """The number of parts that each chunk's work is split into; 0 if each rank should compute its own chunks."""

    def compute_jointly(self, chunk: Chunk, peers: Peers, rank: Rank) -> Sequence[NDArray[Any]] | None:
        """The chunk's outputs on the host, on rank 0, which writes them; None on the others."""

    def take_progress(self, note: str) -> None:
        """Take over `progress_note` of a process that computes."""

    def progress_note(self) -> str: ...


@runtime_checkable
class SharedJob(OpenJob, Protocol):
    """A job of `shards` fixed parts. The output has the same bits for any number of ranks."""

    # How the shards' partial results are combined, element by element.
    reduction: Literal["sum", "min", "max"]

    @property
    def shards(self) -> int:
        """The number of parts of each chunk's work; 1: nothing to share."""

    def share_bytes(self, shards: int) -> int:
        """Bytes that a rank takes per sample of the output while it holds the results of this many shards."""

    def facts(self) -> Any:
        """What `SharedWorkload.join` need not find out again: small, and picklable."""

    def share(self, region: Region, shard: int, rank: Rank) -> Any:
        """One shard's result for a region of the output: on the rank's device, of the same shape for all shards."""

    def whole(self, region: Region, total: Any) -> NDArray[Any]:
        """The region's output, on the host, from the combined results of all shards."""

    def share_notes(self) -> Mapping[str, Any]:
        """What this process has found since the last call, for `add_share_notes`; ready for JSON."""

    def add_share_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over what another process has found."""


@runtime_checkable
class SharedWorkload(Protocol):
    """A workload whose jobs are `SharedJob`s."""

    def join(self, spec: JobSpec, facts: Any) -> SharedJob:
        """The same job in another process."""

"""Jobs that the ranks of a gang do together: sums over many parts of the input, or one chunk made by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from numpy.typing import NDArray

from kernels.runtime.threads import check_wanted
from pipeline.formats.image.base import Region
from pipeline.workloads.protocol import ArraySpec, Chunk, JobSpec, OpenJob


class Room(Protocol):
    """Arrays on the host that a rank's device can fetch, and their twins on the device; the same ones on a CPU."""

    @property
    def host(self) -> Sequence[NDArray[Any]]: ...

    @property
    def device(self) -> Sequence[Any]: ...

    def upload(self) -> None:
        """Copy the host's arrays to the device, in stream order."""

    def computed(self) -> None:
        """Mark, for the receipt, the end of the work on these arrays that was launched since the upload."""

    def wait(self) -> None:
        """Wait until that work is done and the host's arrays may be filled again."""


class Rank(Protocol):
    """What one rank of a gang offers to the work: its device, and whether to go on."""

    threads: int  # that compute on a CPU
    like: Any  # an array of the device, NumPy's or CuPy's

    def room(self, specs: Sequence[ArraySpec]) -> Room:
        """Such arrays, on the host (pinned, for a GPU) and on the device."""

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
    partials: dict[int, Any]  # their results, kept for another try if a rank is lost

    @property
    def communicator(self) -> Collectives:
        """For the device's arrays."""

    @property
    def control(self) -> Collectives:
        """For the host's arrays."""

    def check(self) -> None:
        """Raises CommunicatorError if the other ranks have given up."""


class Alone:
    """The only rank: `Peers` without any others."""

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
        """One rank's sum is always whole."""

    def allreduce(self, array: Any, /) -> Any:
        return array

    def allgather(self, array: Any, /) -> Any:
        return array[None]

    def broadcast(self, array: Any, /, *, root: int = 0) -> Any:
        return array


@runtime_checkable
class JointJob(OpenJob, Protocol):
    """A job whose ranks can make each chunk together, with all-reduces while they compute."""

    def joint_parts(self, chunks: Sequence[Chunk], ranks: int) -> int:
        """The number of parts into which the work of each chunk is split; 0 if each rank should make its own chunks."""

    def compute_jointly(self, chunk: Chunk, peers: Peers, rank: Rank) -> Sequence[NDArray[Any]] | None:
        """The chunk's outputs on the host, on rank 0, which writes them; None on the others."""

    def take_progress(self, note: str) -> None:
        """Take over `progress_note` of a process that computes."""

    def progress_note(self) -> str: ...


@runtime_checkable
class SharedJob(OpenJob, Protocol):
    """A job of `shards` fixed parts. Whichever ranks compute them, the output has the same bits."""

    # How the shards' partial results are combined, element by element.
    reduction: Literal["sum", "min", "max"]

    @property
    def shards(self) -> int:
        """The number of parts of each chunk's work; 1: there is nothing to share."""

    def share_bytes(self, shards: int) -> int:
        """Memory that a rank takes for each sample of the output while it holds the results of so many shards."""

    def facts(self) -> Any:
        """What `SharedWorkload.join` needs not find out again: small, and picklable."""

    def share(self, region: Region, shard: int, rank: Rank) -> Any:
        """One shard's result for a region of the output: an array on the rank's device, alike for all shards."""

    def whole(self, region: Region, total: Any) -> NDArray[Any]:
        """The region's output, on the host, from the combined results of all shards."""

    def share_notes(self) -> Mapping[str, Any]:
        """What this process has found out since the last call that `add_share_notes` can use, ready for JSON."""

    def add_share_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over what another process has found out."""


@runtime_checkable
class SharedWorkload(Protocol):
    """A workload whose jobs are `SharedJob`s."""

    def join(self, spec: JobSpec, facts: Any) -> SharedJob:
        """The same job in another process."""

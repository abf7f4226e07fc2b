"""Jobs that the ranks of a gang share among them: sums over many parts of the input, or one chunk made by all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

from kernels.runtime.threads import check_wanted
from pipeline.formats.image.base import Region
from pipeline.workloads.base import ArraySpec, Chunk, JobSpec, Workload


class Room(Protocol):
    """Arrays on the host that a rank's device can fetch, and their twins on the device; the same ones on a CPU."""

    @property
    def host(self) -> Sequence[NDArray[Any]]: ...

    @property
    def device(self) -> Sequence[Any]: ...

    def upload(self) -> None:
        """Bring the host's arrays to the device, in the order of the device's work."""

    def computed(self) -> None:
        """For the receipt: the work that was given to the device since the upload is what these arrays are for."""

    def wait(self) -> None:
        """Until that is done, and no one reads the host's arrays: they may then be filled anew."""


class Rank(Protocol):
    """What one rank of a gang offers to the work: its device, and a word on whether to go on."""

    threads: int  # that compute on a CPU
    like: Any  # an array of the device, NumPy's or CuPy's, by which its kind is told

    def room(self, specs: Sequence[ArraySpec]) -> Room:
        """Such arrays, on the host (pinned, for a GPU) and on the device."""

    def enter(self) -> None:
        """Prepare the calling thread for the device."""

    def check(self) -> None:
        """CommunicatorError where the other ranks need not be waited for."""

    def note_read(self, seconds: float, nbytes: int) -> None:
        """For the receipt: reading took so long. From any thread."""


class Collectives(Protocol):
    """What `pipeline.cluster.communicators.base.Communicator` offers of it; each is called by all ranks at once."""

    def allreduce(self, array: Any, /) -> Any: ...

    def allgather(self, array: Any, /) -> Any: ...

    def broadcast(self, array: Any, /, *, root: int = 0) -> Any: ...

    def confirm(self) -> None: ...


class Peers(Protocol):
    """The ranks of a gang, as one of them sees them: `pipeline.cluster.gang.member.Member`."""

    rank: int
    size: int
    shards: tuple[int, ...]  # the parts that are this rank's own
    partials: dict[int, Any]  # what it keeps of them for another try, should a rank be lost

    @property
    def communicator(self) -> Collectives:
        """For the device's arrays."""

    @property
    def control(self) -> Collectives:
        """For the host's."""

    def check(self) -> None:
        """CommunicatorError where the other ranks need not be waited for."""


class Alone:
    """The only rank: what `Peers` asks, without anybody else."""

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
        """Nobody can be lost; but what is made may be wanted no more."""
        check_wanted()

    def confirm(self) -> None:
        """Nor spoil a sum."""

    def allreduce(self, array: Any, /) -> Any:
        return array

    def allgather(self, array: Any, /) -> Any:
        return array[None]

    def broadcast(self, array: Any, /, *, root: int = 0) -> Any:
        return array


class JointWorkload(Workload):
    """A workload whose ranks can make each chunk together, with sums that go round as they compute."""

    @abstractmethod
    def joint_parts(self, chunks: Sequence[Chunk], ranks: int) -> int:
        """Into how many parts the work of each of these chunks falls, where so many ranks are better off making one
        chunk after another together than each its own; 0: they are not."""

    @abstractmethod
    def compute_jointly(self, chunk: Chunk, peers: Peers, rank: Rank) -> Sequence[NDArray[Any]] | None:
        """The chunk's outputs on the host, on rank 0, which writes them; None on the others."""

    @abstractmethod
    def take_progress(self, note: str) -> None:
        """What `progress_note` says in a process that computes."""


class SharedWorkload(Workload):
    """A workload of `shards` fixed parts. Whichever ranks compute them, the output has the same bits."""

    # How the shards' partial results are put together, element by element.
    reduction: Literal["sum", "min", "max"]

    @property
    @abstractmethod
    def shards(self) -> int:
        """Into how many parts each chunk's work falls; 1: there is nothing to share."""

    @abstractmethod
    def share_bytes(self, shards: int) -> int:
        """Memory that a rank takes for each sample of the output while it holds so many shards' results."""

    @abstractmethod
    def facts(self) -> Any:
        """What `joining` needs not find out again: small, and to be pickled."""

    @classmethod
    @abstractmethod
    def joining(cls, spec: JobSpec, facts: Any) -> Self:
        """The same job in another process."""

    @abstractmethod
    def share(self, region: Region, shard: int, rank: Rank) -> Any:
        """One shard's result for a region of the output: an array on the rank's device, alike for all shards."""

    @abstractmethod
    def whole(self, region: Region, total: Any) -> NDArray[Any]:
        """The region's output, on the host, from the partial results of all shards put together."""

    @abstractmethod
    def share_notes(self) -> Mapping[str, Any]:
        """What this process has found out on the way that `add_share_notes` can use, ready for JSON; told once."""

    @abstractmethod
    def add_share_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over what another process has found out."""

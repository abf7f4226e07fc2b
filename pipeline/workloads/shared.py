"""Jobs whose output is a sum over many parts of the input, which the ranks of a gang share among them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

from pipeline.formats.base import Region
from pipeline.workloads.base import ArraySpec, JobSpec, Workload


class Room(Protocol):
    """Arrays on the host that a rank's device can fetch, and their twins on the device; the same ones on a CPU."""

    @property
    def host(self) -> Sequence[NDArray[Any]]: ...

    @property
    def device(self) -> Sequence[Any]: ...

    def upload(self) -> None:
        """Bring the host's arrays to the device, in the order of the device's work."""

    def wait(self) -> None:
        """Until the last upload has read the host's arrays, which may then be filled anew."""


class Rank(Protocol):
    """What one rank of a gang offers to the work: its device, and a word on whether to go on."""

    threads: int  # that compute on a CPU

    def room(self, specs: Sequence[ArraySpec]) -> Room:
        """Such arrays, on the host (pinned, for a GPU) and on the device."""

    def enter(self) -> None:
        """Prepare the calling thread for the device."""

    def check(self) -> None:
        """CommunicatorError where the other ranks need not be waited for."""

    def note_read(self, seconds: float, nbytes: int) -> None:
        """For the receipt: reading took so long. From any thread."""


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

"""Which calls are launched one by one, captured, or launched as graphs; no GPU: a stand-in captures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernels.runtime.repeated import PER_THREAD_STREAM, RepeatedCalls


class Stream:
    def __init__(self, handle: int, capturing: bool = False) -> None:
        self.ptr, self._capturing = handle, capturing

    def is_capturing(self) -> bool:
        return self._capturing


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done: "run" or "capture"; and "launch" of graphs."""
    done: list[str] = []

    def captured(_calls: Any, _handle: int, _run: Any) -> Any:
        done.append("capture")
        return SimpleNamespace(launch=lambda stream: done.append(f"launch on {stream.ptr}"))

    monkeypatch.setattr(RepeatedCalls, "_captured", captured)
    return done


def test_the_second_call_is_captured_and_later_ones_only_launched(log: list[str]) -> None:
    calls, stream = RepeatedCalls(), Stream(7)
    for _ in range(3):
        calls((1, 2), stream, lambda _stream: log.append("run"))
    assert log == ["run", "capture", "launch on 7", "launch on 7"]


def test_other_arrays_and_other_streams_are_other_calls(log: list[str]) -> None:
    calls = RepeatedCalls()
    for key, handle in (((1,), 7), ((2,), 7), ((1,), 0)):
        calls(key, Stream(handle), lambda _stream: log.append("run"))
    assert log == ["run"] * 3


def test_the_oldest_call_is_forgotten(log: list[str]) -> None:
    calls, stream = RepeatedCalls(most=2), Stream(0)
    for key in (1, 2, 1, 3, 1, 2):
        calls((key,), stream, lambda _stream: log.append("run"))
    assert log == ["run", "run", "capture", "launch on 0", "run", "launch on 0", "run"]


@pytest.mark.parametrize("stream", [Stream(PER_THREAD_STREAM), Stream(9, capturing=True)])
def test_streams_that_cannot_use_a_graph_run_each_call(log: list[str], stream: Stream) -> None:
    calls = RepeatedCalls()
    for _ in range(3):
        calls((1,), stream, lambda _stream: log.append("run"))
    assert log == ["run"] * 3

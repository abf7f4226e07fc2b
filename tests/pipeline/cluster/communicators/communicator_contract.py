"""What every communicator must do. A transport's tests subclass `CommunicatorContract` and say how to start it.

The oracle: integers as Python's own, modulo 2ⁿ; floats as exact rational sums, within the roundings of `size` ranks.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest

from pipeline import metrics
from pipeline.cluster.communicators.base import BUCKETED_BYTES, OPS, REDUCED
from pipeline.cluster.communicators.deterministic import fixed_tree_sum
from pipeline.errors import Aborted, CommunicatorError, DeadlineExceeded

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (5, 11), (2, 3, 13)]
ANSWER_SECONDS = 20


def numbers(dtype, shape, rank, op="sum"):
    """Values that differ by rank, with extremes for integers; for products near 1."""
    rng = np.random.default_rng([rank, len(shape)])
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if op == "prod":
        return np.asarray(rng.uniform(0.5, 1.5, shape)).astype(dtype)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def exactly(op, values):
    """One element of each rank combined as rational numbers."""
    total = values[0]
    for value in values[1:]:
        total = {"sum": total + value, "prod": total * value, "min": min(total, value), "max": max(total, value)}[op]
    return total


def assert_reduced(found, arrays, op):
    """Every element against exact arithmetic."""
    dtype = arrays[0].dtype
    assert found.dtype == dtype
    assert found.shape == arrays[0].shape
    if dtype.kind == "c":
        assert_reduced(found.real, [each.real for each in arrays], op)
        assert_reduced(found.imag, [each.imag for each in arrays], op)
        return
    for index in np.ndindex(arrays[0].shape):
        if dtype.kind in "iu":
            exact = exactly(op, [int(each[index]) for each in arrays])
            width = 8 * dtype.itemsize
            wrapped = exact % 2**width
            if dtype.kind == "i" and wrapped >= 2 ** (width - 1):
                wrapped -= 2**width
            assert int(found[index]) == wrapped
            continue
        values = [Fraction(float(each[index])) for each in arrays]
        exact = exactly(op, values)
        roundings = 0 if op in ("min", "max") else len(arrays) - 1
        size = sum(map(abs, values)) if op == "sum" else abs(exact)
        allowed = roundings * Fraction(float(np.finfo(dtype).eps)) * size
        assert np.isfinite(found[index])
        assert abs(Fraction(float(found[index])) - exact) <= allowed


class CommunicatorContract:
    """Subclasses set `sizes` and `communicators(size)`; where arrays are not NumPy's, also `on`, `array` and `back`."""

    sizes: tuple[int, ...] = (1, 2, 3, 5)

    def communicators(self, size, **options):
        """A context manager of one communicator for each rank."""
        raise NotImplementedError

    def on(self, communicator):
        """A context for what a rank's thread does: its device."""
        return nullcontext()

    def array(self, values):
        """Made on a rank's thread."""
        return values

    def back(self, array):
        return array

    def one_a_process(self, communicators):
        """One rank of each process."""
        return communicators[:1]

    def together(self, communicators, function):
        """What a function of a rank's communicator returns or raises, on every rank at once."""

        def one(communicator):
            try:
                with self.on(communicator):
                    return function(communicator)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(communicators)) as threads:
            return list(threads.map(one, communicators, timeout=ANSWER_SECONDS))

    def results(self, communicators, function):
        found = self.together(communicators, function)
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def pytest_generate_tests(self, metafunc):
        """`ranks` for every size of the transport, `several` where a test is about the others."""
        if "ranks" in metafunc.fixturenames:
            metafunc.parametrize("ranks", self.sizes, indirect=True)
        if "several" in metafunc.fixturenames:
            metafunc.parametrize("several", [size for size in self.sizes if size > 1], indirect=True)

    @pytest.fixture
    def ranks(self, request):
        with self.communicators(request.param) as communicators:
            yield communicators

    @pytest.fixture
    def several(self, request):
        with self.communicators(request.param) as communicators:
            yield communicators

    def test_ranks_are_numbered(self, ranks):
        assert [each.rank for each in ranks] == list(range(len(ranks)))
        assert {each.size for each in ranks} == {len(ranks)}
        assert not any(each.aborted for each in ranks)

    def test_allreduce_of_every_dtype_and_op(self, ranks):
        for dtype, op in product(REDUCED, OPS):
            if dtype.kind == "c" and op != "sum":
                continue
            arrays = [numbers(dtype, (2, 13), rank, op) for rank in range(len(ranks))]

            def reduced(each, arrays=arrays, op=op):
                mine = self.array(arrays[each.rank].copy())
                total = each.allreduce(mine, op)
                np.testing.assert_array_equal(self.back(mine), arrays[each.rank])
                return self.back(total)

            found = self.results(ranks, reduced)
            assert_reduced(found[0], arrays, op)
            assert {each.tobytes() for each in found} == {found[0].tobytes()}

    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_shape_goes_through_every_collective(self, ranks, shape):
        arrays = [numbers("f8", shape, rank) for rank in range(len(ranks))]
        root = len(ranks) - 1

        def all_of_them(each):
            mine = self.array(arrays[each.rank])
            out = self.array(np.full(shape, np.nan))
            assert each.allreduce(mine, out=out) is out
            reduced = each.reduce(mine, "max", root=root)
            assert (reduced is None) == (each.rank != root)
            gathered = each.allgather(mine)
            each.barrier()
            copy = self.array(arrays[each.rank].copy())
            assert each.broadcast(copy, root=root) is copy
            reduced = None if reduced is None else self.back(reduced)
            return self.back(out), self.back(gathered), self.back(copy), reduced

        for out, gathered, copy, reduced in self.results(ranks, all_of_them):
            assert_reduced(out, arrays, "sum")
            np.testing.assert_array_equal(gathered, np.stack(arrays))
            np.testing.assert_array_equal(copy, arrays[root])
            if reduced is not None:
                np.testing.assert_array_equal(reduced, np.max(arrays, axis=0))

    def test_arrays_of_many_blocks(self, ranks):
        arrays = [numbers("i8", (300_007,), rank) for rank in range(len(ranks))]
        with np.errstate(over="ignore"):
            expected = np.sum(arrays, axis=0)

        def moved(each, root):
            reduced = each.reduce(self.array(arrays[each.rank]), root=root)
            copy = each.broadcast(self.array(arrays[each.rank].copy()), root=root)
            return None if reduced is None else self.back(reduced), self.back(copy)

        for root in range(len(ranks)):
            found = self.results(ranks, partial(moved, root=root))
            np.testing.assert_array_equal(found[root][0], expected)
            for _, copy in found:
                np.testing.assert_array_equal(copy, arrays[root])

    def test_bits_travel_unchanged(self, ranks):
        """Signed zeros, infinities and the payloads of NaNs, and dtypes that are not reduced."""
        words = np.array([0x8000000000000000, 0x7FF0000000000000, 0x7FF8000000000123, 1], np.uint64)
        for values in (words.view(np.float64), words.view(np.int16), words.view(np.uint16), words > 1):
            gathered = self.results(ranks, lambda each, values=values: self.back(each.allgather(self.array(values))))
            for each in gathered:
                assert each.tobytes() == values.tobytes() * len(ranks)

    def test_many_arrays_are_each_reduced(self, ranks):
        """Small ones of several dtypes in a bucket each, one too large for it, one of no elements."""
        shapes = [(), (3,), (0,), (5, 7), (BUCKETED_BYTES // 8,), (2, 3, 13), (1,), (101,)]
        dtypes = ["f8", "f4", "f8", "c8", "i8", "f4", "i4", "f8"]
        arrays = [
            [numbers(dtype, shape, rank) for dtype, shape in zip(dtypes, shapes, strict=True)]
            for rank in range(len(ranks))
        ]

        def many(each):
            mine = [self.array(array.copy()) for array in arrays[each.rank]]
            assert each.allreduce_many([]) == []
            found = each.allreduce_many(mine)
            lowest = each.allreduce_many(mine[:3], "min")
            assert all(result.flags.c_contiguous for result in found)
            for given, array in zip(mine, arrays[each.rank], strict=True):
                np.testing.assert_array_equal(self.back(given), array)
            return [self.back(result) for result in found], [self.back(result) for result in lowest]

        for found, lowest in self.results(ranks, many):
            for number, result in enumerate(found):
                given = [each[number] for each in arrays]
                if result.size > 1000:
                    with np.errstate(over="ignore"):
                        np.testing.assert_array_equal(result, np.sum(given, axis=0))
                else:
                    assert_reduced(result, given, "sum")
            for number, result in enumerate(lowest):
                np.testing.assert_array_equal(result, np.min([each[number] for each in arrays], axis=0))

    def test_float_overflow_is_infinite(self, ranks):
        largest = np.full(3, np.finfo(np.float16).max)
        for each in self.results(ranks, lambda each: self.back(each.allreduce(self.array(largest)))):
            assert np.all(each == (largest if len(ranks) == 1 else np.float16(np.inf)))

    def test_nan_survives_a_sum(self, ranks):
        values = np.array([1.0, np.nan, 2.0])

        def summed(each):
            return self.back(each.allreduce(self.array(values if each.rank == 0 else values[::-1].copy())))

        for found in self.results(ranks, summed):
            assert np.isnan(found[1])
            assert np.isfinite(found[[0, 2]]).all()

    @pytest.mark.parametrize("shards", [5, 8, 13])
    def test_the_deterministic_sum_has_one_answer(self, ranks, shards):
        partials = [numbers("f4", (101,), shard) for shard in range(shards)]
        expected = fixed_tree_sum_alone(partials)
        for holders in (
            [shard * len(ranks) // shards for shard in range(shards)],
            [shard % len(ranks) for shard in range(shards)],
        ):

            def summed(each, holders=holders):
                mine = {shard: self.array(partials[shard]) for shard in range(shards) if holders[shard] == each.rank}
                return self.back(fixed_tree_sum(each, mine, holders))

            for found in self.results(ranks, summed):
                assert found.tobytes() == expected.tobytes()

    def test_what_cannot_be_sent_is_refused_before_it_is(self, ranks):
        def refused(each):
            good = self.array(np.arange(6.0).reshape(2, 3))
            with pytest.raises(ValueError, match="op 'mean' is not one of sum"):
                each.allreduce(good, "mean")
            with pytest.raises(TypeError, match="complex numbers have a sum only"):
                each.allreduce(self.array(np.ones(2, np.complex64)), "prod")
            with pytest.raises(TypeError, match="int16 cannot be reduced"):
                each.allreduce(self.array(np.ones(2, np.int16)))
            with pytest.raises(ValueError, match="C-contiguous"):
                each.allreduce(good.T)
            with pytest.raises(ValueError, match="out must be of shape"):
                each.allreduce(good, out=self.array(np.zeros((3, 2))))
            with pytest.raises(ValueError, match="out must lie apart"):
                each.allreduce(good, out=good)
            with pytest.raises(ValueError, match=f"root {each.size} is not one of"):
                each.broadcast(good, root=each.size)
            with pytest.raises(ValueError, match="root -1 is not one of"):
                each.reduce(good, root=-1)
            each.barrier()  # all that did not hurt

        self.results(ranks, refused)

    def test_an_abort_ends_every_rank(self, ranks):
        """One rank does not come and gives up instead; the others are in the collective by then or come later."""
        last = len(ranks) - 1

        def one(each):
            if each.rank == last:
                each.abort()
                each.abort("error")  # the first reason stays
            each.allreduce(self.array(np.ones(100_000)), timeout_s=ANSWER_SECONDS)

        started = time.monotonic()
        found = self.together(ranks, one)
        assert time.monotonic() - started < 5
        assert all(isinstance(error, CommunicatorError) for error in found)
        assert isinstance(found[last], Aborted)
        assert str(found[last]) == f"rank {last} of {len(ranks)} gave up: requested"
        for error in self.together(ranks, lambda each: each.barrier()):
            assert isinstance(error, Aborted)
        for error in self.together(ranks, lambda each: each.check()):
            assert isinstance(error, Aborted)
        assert all(each.aborted for each in ranks)

    def test_metrics_count_bytes_seconds_and_aborts(self, ranks):
        """Of every rank of a process together."""
        operations = ("allreduce", "reduce", "broadcast", "allgather", "barrier")

        def counted(each):
            return {
                name: (
                    metrics.collective_bytes.labels(name)._value.get(),
                    metrics.collective_seconds.labels(name)._value.get(),
                )
                for name in operations
            }

        def all_of_them(each):
            ones = self.array(np.ones(100))
            each.allreduce(ones)
            each.allreduce_many([ones, ones])
            each.reduce(ones)
            each.broadcast(ones)
            each.allgather(ones)
            each.barrier()

        def aborts(each):
            return metrics.communicator_aborts.labels("deadline")._value.get()

        processes = self.one_a_process(ranks)
        before = self.results(processes, counted)
        self.results(ranks, all_of_them)
        after = self.results(processes, counted)
        for earlier, later in zip(before, after, strict=True):
            for name, calls in zip(operations, (3, 1, 1, 1, 0), strict=True):
                assert later[name][0] - earlier[name][0] == 800 * calls * len(ranks) // len(processes), name
                assert later[name][1] > earlier[name][1], name
        count = self.results(ranks[:1], aborts)[0]
        ranks[0].abort("deadline")
        assert self.results(ranks[:1], aborts) == [count + 1]
        assert self.results(ranks[:1], lambda each: metrics.communicator_epoch._value.get()) == [ranks[0].epoch]

    def test_ranks_close_together(self, ranks):
        def one(each):
            with each:
                return self.back(each.allreduce(self.array(np.full(3, each.rank))))

        for found in self.results(ranks, one):
            np.testing.assert_array_equal(found, np.full(3, sum(range(len(ranks)))))


class SeveralRanksContract(CommunicatorContract):
    """Besides, where there are other ranks to wait for."""

    # Whether a rank that makes another call is noticed as such.
    notices_mismatch = True

    def test_a_waiting_rank_is_woken_by_its_own_abort(self, several):
        """As the service aborts: from another thread, while the rank waits for one that does not come."""

        def one(each):
            if each.rank == 0:
                return CommunicatorError("did not come")
            each.barrier(timeout_s=ANSWER_SECONDS)
            return None

        started = time.monotonic()
        aborting = threading.Timer(0.1, several[-1].abort)
        aborting.start()
        assert all(isinstance(error, CommunicatorError) for error in self.together(several, one))
        assert time.monotonic() - started < 5
        aborting.join()

    def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_said(self, several):
        started = time.monotonic()
        found = self.together(several, lambda each: None if each.rank == 0 else each.barrier(timeout_s=0.2))
        assert 0.2 <= time.monotonic() - started < 5
        assert found[0] is None
        assert any(isinstance(error, DeadlineExceeded) for error in found[1:])
        assert all(isinstance(error, CommunicatorError) for error in found[1:])

    def test_different_calls_are_noticed(self, several):
        if not self.notices_mismatch:
            return
        for wrong in (
            lambda each: each.allreduce(self.array(np.ones(3))),
            lambda each: each.broadcast(self.array(np.ones(4))),
        ):
            with self.communicators(len(several)) as fresh:
                found = self.together(
                    fresh,
                    lambda each, wrong=wrong: wrong(each) if each.rank == 1 else each.allreduce(self.array(np.ones(4))),
                )
            assert any("is in" in str(error) for error in found)
            assert all(isinstance(error, CommunicatorError) for error in found)


def fixed_tree_sum_alone(partials):
    """The tree written down a second time, level by level."""
    level = list(partials)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]

"""Groups of coils: which stay on the device, the order of those from the host, and equal results."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kernels.nufft import Toeplitz, toeplitz_kernel
from kernels.sense import GroupedMaps, sensitivities, toeplitz_normal
from kernels.sense.coil_groups import _Upload, group_parts, groups_of, parts_of, pinned, plan_residency, streamed
from tests.kernels.sense.phantom import coil_maps, normalised_error, radial

N, COILS = 16, 18
A_COIL = N * N * 8


class Device:
    """A fake of CuPy's streams for uploads: copies happen as early or as late as allowed."""

    def __init__(self, late):
        self.late, self.copies = late, 0
        device = self

        class Event:
            def __init__(self, disable_timing=False):
                self.before = []

            def record(self, stream=None):
                self.before = list(stream.queue) if stream is not None else []

        class Stream:
            def __init__(self, non_blocking=True):
                self.queue = []

            def wait_event(self, event):
                """The computing stream waits here, so everything recorded before is done."""
                for copy in event.before:
                    copy()

            def synchronize(self):
                for copy in self.queue:
                    copy()

        self.current = Stream()
        self.cuda = SimpleNamespace(Stream=Stream, Event=Event, get_current_stream=lambda: device.current)

    def empty(self, shape, dtype):
        device, values = self, np.full(shape, np.nan, dtype)

        class Array(np.ndarray):
            @property
            def data(self):
                return SimpleNamespace(copy_from_host_async=lambda *what: device.copy(values, *what))

        return values.view(Array)

    def copy(self, values, pointer, nbytes, stream):
        done = []
        source = np.frombuffer((np.ctypeslib.ctypes.c_char * nbytes).from_address(pointer), values.dtype)

        def copy():
            if not done:
                done.append(True)
                self.copies += 1
                values.reshape(-1)[: len(source)] = source

        stream.queue.append(copy)
        if not self.late:
            copy()


@pytest.mark.parametrize("late", [False, True])
def test_uploads_come_in_turn_and_stay_until_the_next_is_asked_for(late):
    device = Device(late)
    hosts = [np.full((3 if n < 4 else 2, 4), n, np.complex64) for n in range(5)]
    upload = _Upload(device, hosts)
    for _ in range(3):
        for number in range(5):
            with upload.next() as array:
                assert array.shape == hosts[number].shape
                np.testing.assert_array_equal(array, hosts[number])
    upload.close()
    assert device.copies == 3 * 5 + 2  # two are on their way when a pass ends: the first of the next
    device = Device(late)
    for number, array in enumerate(streamed(device, hosts)):
        np.testing.assert_array_equal(array, hosts[number])
    assert number == 4
    assert device.copies == 5


def test_groups_cover_all_coils_once():
    for coils, pixels in ((1, 100), (5, 1000), (32, 1 << 24), (64, 1 << 27), (18, N * N)):
        parts = group_parts(coils, pixels)
        assert [coil for part in parts for coil in range(part.start, part.stop)] == list(range(coils))
        assert len({part.stop - part.start for part in parts[:-1]}) <= 1
        assert (parts[0].stop - parts[0].start) * pixels <= max(1 << 27, pixels)
    assert len(group_parts(32, 1 << 24)) == 8


@pytest.mark.parametrize(("left", "resident"), [(None, 5), (18, 5), (17, 2), (16, 2), (12, 1), (8, 0)])
def test_what_fits_stays(left, resident):
    residency = plan_residency(COILS, (N, N), None if left is None else left * A_COIL)
    assert (residency.groups, len(residency.resident)) == (5, resident)
    streamed_coils = sum(
        part.stop - part.start for n, part in enumerate(group_parts(COILS, N * N)) if n not in residency.resident
    )
    assert (residency.nbytes, residency.streamed) == (COILS * A_COIL, streamed_coils * A_COIL)
    assert streamed_coils == 0 or left * A_COIL >= residency.nbytes - residency.streamed + 8 * A_COIL


def test_a_device_without_room_for_two_groups_is_refused():
    with pytest.raises(ValueError, match="of which 2 groups take 16384"):
        plan_residency(COILS, (N, N), 7 * A_COIL)


def test_grouped_maps_are_scaled_and_normal_operators_alike():
    """The same bits wherever the groups are stored, and all coils at once agree up to rounding."""
    raw = (coil_maps(COILS, N) * 3).astype(np.complex64)
    points = radial(12, 2 * N, N).reshape(-1, 2)
    toeplitz = Toeplitz(toeplitz_kernel(points, None, (N, N), 1e-5), (N, N))
    picture = np.random.default_rng(0).normal(size=(N, N)).astype(np.complex64)
    found = []
    for left, again in ((None, False), (17 * A_COIL, False), (8 * A_COIL, True)):
        maps = GroupedMaps(raw, COILS, (N, N), plan_residency(COILS, (N, N), left), made_again=again)
        maps.make(lambda part: raw[part], lambda squares: squares)
        assert parts_of(maps) == [part for part, _ in groups_of(maps)]
        whole = np.concatenate([group for _, group in maps.groups()])
        np.testing.assert_allclose((np.abs(whole) ** 2).sum(axis=0), 1, rtol=1e-5)
        found.append(toeplitz_normal(toeplitz, maps)(picture))
        maps.close()
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    whole = toeplitz_normal(toeplitz, sensitivities.given(raw))(picture)
    assert normalised_error(found[0], whole) < 1e-6


@pytest.mark.gpu
def test_on_a_gpu_streamed_maps_make_the_same_bits_pass_after_pass():
    import cupy

    n, coils = 64, 20
    rng = np.random.default_rng(0)
    raw = rng.normal(size=(coils, n, n, n)).astype(np.float32).astype(np.complex64)
    points = cupy.asarray(rng.uniform(-n / 2, n / 2, (3000, 3)))
    toeplitz = Toeplitz(toeplitz_kernel(points, None, (n, n, n), 1e-4), (n, n, n))
    picture = cupy.asarray(rng.normal(size=(n, n, n)).astype(np.complex64))
    expected = None
    for left, again in ((None, False), (19, False), (12, False), (8, False), (12, True)):
        residency = plan_residency(coils, (n, n, n), None if left is None else left * n**3 * 8)
        maps = GroupedMaps(picture, coils, (n, n, n), residency, made_again=again)
        maps.make(lambda part: cupy.asarray(raw[part]), lambda squares: squares)
        normal = toeplitz_normal(toeplitz, maps)
        for _ in range(20):
            found = normal(picture).get()
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected)
        maps.close()


def test_others_coils_count_and_a_mask_cuts():
    raw = np.ones((4, N, N), np.complex64)
    mask = np.arange(N) > 3
    maps = GroupedMaps(raw, 4, (N, N), plan_residency(4, (N, N), None))
    maps.make(lambda part: raw[part], lambda squares: squares + 12, mask & np.ones((N, 1), bool))
    [(_, group)] = maps.groups()
    np.testing.assert_allclose(group[:, :, 4:], 0.25)
    assert not group[:, :, :4].any()


def test_adding_needs_somewhere_to_add_to():
    toeplitz = Toeplitz(toeplitz_kernel(np.zeros((1, 2)), None, (N, N), 1e-5), (N, N))
    picture, maps = np.ones((N, N), np.complex64), np.ones((2, N, N), np.complex64)
    for out in (None, picture):
        with pytest.raises(ValueError, match="add needs an out that is not the image"):
            toeplitz.apply_sense(picture, maps, out, add=True)
    once = toeplitz.apply_sense(picture, maps)
    twice = toeplitz.apply_sense(picture, maps, once.copy(), add=True)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)
    assert toeplitz.work_bytes(2) == 0


def test_host_memory_is_of_the_size_that_was_asked_for():
    assert pinned(np, (3, 5)).shape == (3, 5)

"""Bounds and remarks for measured ladders; that every ladder fits its operation; and, on a GPU, measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels.runtime.ladder import Ladder
from kernels.runtime.launch import compile_for, kernel, observe
from kernels.runtime.measure import LIMITS, LadderResult, Rung, bound_of, ladders_of, unpaid
from kernels.runtime.operations import cuda_module

CLASSIC = ("transpose", "reduce", "scan", "histogram")


def rung(name: str, seconds: float, **changes: Any) -> Rung:
    made: dict[str, Any] = {
        "name": name, "summary": f"what {name} does", "seconds": seconds, "spread": (seconds, seconds),
        "bytes_per_s": 1e9 / seconds, "flops_per_s": 0.0, "fraction": 0.5, "bound": "latency", "occupancy": None,
        "calls": 10,
    }  # fmt: skip
    return Rung(**{**made, **changes})


def ladder_result(*rungs: Rung, **changes: Any) -> LadderResult:
    made: dict[str, Any] = {
        "operation": "transpose", "ladder": "an input", "limit": "copy", "limit_per_s": 4e12, "bytes": 10**9,
        "flops": 0, "bound_rung": None, "rungs": rungs, "libraries": (),
    }  # fmt: skip
    return LadderResult(**{**made, **changes})


def test_the_rules_of_the_roofline() -> None:
    assert bound_of(0.9, 0.1) == "memory"
    assert bound_of(0.61, 0.61) == "memory"
    assert bound_of(0.2, 0.7) == "instruction"
    assert bound_of(0.59, 0.59) == "latency"
    assert bound_of(0.1, 3.0) == "other"  # tensor cores, or fewer operations than the definition


def test_steps_that_do_not_pay_are_named() -> None:
    result = ladder_result(rung("a", 1.0), rung("b", 0.5), rung("c", 0.495), rung("d", 0.6), rung("e", 0.1))
    assert unpaid(result) == ["c is as fast as b (within 2 %)", "d is 21 % slower than c"]


def test_much_slower_is_said_in_times() -> None:
    assert unpaid(ladder_result(rung("a", 1.0), rung("b", 14.09))) == ["b takes 14.1 times as long as a"]


def test_an_upper_bound_is_no_step() -> None:
    result = ladder_result(rung("copy", 0.1), rung("naive", 1.0), rung("better", 0.2), bound_rung="copy")
    assert unpaid(result) == []


@pytest.mark.parametrize("operation", kernels.names())
def test_every_ladder_names_variants_of_its_operation(operation: str) -> None:
    variants = cuda_module(operation).VARIANTS
    assert all(name.isidentifier() for name in variants), "a variant is named without spaces"
    for ladder in ladders_of(operation):
        assert isinstance(ladder, Ladder)
        assert ladder.variants, f"{operation}, {ladder.name}: no variants"
        assert set(ladder.variants) <= set(variants), f"{operation}, {ladder.name}"
        assert ladder.bound is None or ladder.bound in ladder.variants
        assert ladder.limit in LIMITS
        counted = {"copy": ladder.bytes, "read": ladder.bytes, "fma": ladder.flops, "roots": ladder.roots}
        assert counted[ladder.limit] > 0, f"{operation}, {ladder.name}: its limit counts nothing"


@pytest.mark.parametrize("operation", [*CLASSIC, "smoothing"])
def test_the_classic_operations_have_ladders(operation: str) -> None:
    names = [ladder.name for ladder in ladders_of(operation)]
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", CLASSIC)
def test_every_variant_is_on_a_ladder(operation: str) -> None:
    on_ladders = {name for ladder in ladders_of(operation) for name in ladder.variants}
    assert on_ladders == set(cuda_module(operation).VARIANTS)


def test_an_operation_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="no operation named 'nothing'"):
        ladders_of("nothing")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_the_kernels_that_measure_limits_compile(architecture: str) -> None:
    assert len(compile_for("limits", architecture, options=("--Ofast-compile=max",)).lowered) == 5


@pytest.fixture(scope="module")
def meter() -> Any:
    from kernels.runtime.measure import Meter

    return Meter()


@pytest.mark.gpu
@pytest.mark.alone
def test_limits_are_what_devices_of_this_kind_can_do(meter: Any) -> None:
    facts = meter.facts()
    assert set(facts.limits) == set(LIMITS)
    assert 5e10 < facts.limits["copy"] < 2e13
    assert 0.8 < facts.limits["read"] / facts.limits["copy"] < 1.5
    assert 1 < facts.limits["fma"] / facts.limits["roots"] < 32
    assert facts.model


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1 << 20, 1 << 28])
@pytest.mark.alone
def test_a_ladder_is_measured_from_memory_not_from_cache(meter: Any, count: int) -> None:
    """A copy of 1 MiB would be several times faster than the limit if it found its input in the L2 cache."""
    import cupy

    from kernels.runtime.limits import cuda as limits

    task = limits.Task(
        source=limits.random_values(count, "uint8"),
        target=cupy.empty(count, cupy.uint8),
        stream=cupy.cuda.get_current_stream(),
    )
    ladder = Ladder(
        name="a copy", variants=("copy",), bytes=2 * count, flops=0, limit="copy", libraries=dict,
        prepare=lambda name: lambda: limits.VARIANTS[name].run(task),
    )  # fmt: skip
    result = meter.ladder("limits", ladder)
    assert not result.failures
    (found,) = result.rungs
    assert 0 < found.fraction < 1.15
    assert found.fraction > 0.9 or count < 1 << 24
    assert found.spread[0] <= found.seconds <= found.spread[1]
    assert found.occupancy is not None
    assert found.occupancy.kernel == "copy_bytes"
    assert 0 < found.occupancy.active_warps <= found.occupancy.most_warps
    assert 0 < found.occupancy.registers <= 255
    assert found.occupancy.threads == limits.THREADS


@pytest.mark.gpu
def test_a_rung_that_fails_is_told_and_the_others_go_on(meter: Any) -> None:
    from kernels.classic.transpose.cuda import ladders

    good = ladders()[0]

    def prepare(name: str) -> Any:
        if name == "naive":
            raise ValueError("does not fit")
        return good.prepare(name)

    changed = Ladder(**{**vars(good), "prepare": prepare, "variants": ("copy", "naive", "vectors")})
    result = meter.ladder("transpose", changed)
    assert result.failures == {"naive": "ValueError: does not fit"}
    assert [found.name for found in result.rungs] == ["copy", "vectors"]


@pytest.mark.gpu
def test_launches_are_observed() -> None:
    import cupy

    from kernels.classic.transpose.cuda import transpose

    array = cupy.zeros((64, 96), cupy.float32)
    launches = observe(lambda: transpose(array, None, variant="padded"))
    assert [launch.kernel.expression for launch in launches] == ["transpose_tiled<unsigned, 1>"]
    assert (launches[0].grid, launches[0].block) == ((6, 1, 1), (32, 32, 1))
    assert launches[0].kernel is kernel("transpose", "transpose_tiled<unsigned, 1>")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint64", "float32", "float64"])
def test_random_values_are_random(dtype: str) -> None:
    from kernels.runtime.limits.cuda import random_values

    values = random_values(1_000_003, dtype).get()
    assert values.shape == (1_000_003,)
    assert values.dtype == dtype
    span = 1 if values.dtype.kind == "f" else float(np.iinfo(dtype).max)
    assert 0 <= values.min() < 0.01 * span
    assert 0.99 * span < values.max() <= span
    assert abs(values.astype(np.float64).mean() / span - 0.5) < 0.005
    np.testing.assert_array_equal(random_values(1_000_003, dtype).get(), values)
    assert (random_values(1_000_003, dtype, seed=2).get() != values).mean() > 0.9

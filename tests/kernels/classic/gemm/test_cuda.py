"""Matrix products on a CUDA device: every variant against float64 sums of outer products, for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.classic.gemm import gemm, gram
from kernels.classic.gemm.cuda import PRECISIONS, VARIANTS, applies, ladders
from kernels.classic.gemm.cuda import gemm as gemm_on_cuda
from kernels.classic.gemm.cuda import gram as gram_on_cuda
from tests.kernels.classic.gemm.cases import Case, cases, check

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def computed(cupy: Any, name: str, case: Case) -> Any:
    matrices = [cupy.asarray(matrix) for matrix in case.matrices()]
    out = cupy.full((case.m, case.m if case.n is None else case.n), cupy.nan, cupy.float32)
    if case.operation == "gram":
        return gram_on_cuda(*matrices, out, variant=name).get()
    return gemm_on_cuda(*matrices, out, variant=name).get()


@pytest.mark.sanitize("gemm")
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_variant_gives_the_definition(cupy: Any, case: Case) -> None:
    case.check(case.apply(*(cupy.asarray(matrix) for matrix in case.matrices())).get())
    for name in VARIANTS:
        if applies(name, case.operation):
            case.check(computed(cupy, name, case), precision=PRECISIONS.get(name, "float32"))


def test_one_term_is_worse_and_three_terms_are_as_good_as_float32(cupy: Any) -> None:
    case = Case(m=256, k=2048, n=256)
    case.check(computed(cupy, "tensor_3xtf32", case), precision="3xtf32")
    case.check(computed(cupy, "tensor_tf32", case), precision="tf32")
    with pytest.raises(AssertionError):
        case.check(computed(cupy, "tensor_tf32", case), precision="3xtf32")
    values = np.matmul(*(matrix.astype(np.float64) for matrix in case.matrices()))
    error = {name: np.linalg.norm(computed(cupy, name, case) - values) for name in ("double_buffered", "tensor_3xtf32")}
    assert error["tensor_3xtf32"] <= 2 * error["double_buffered"]


@pytest.mark.parametrize("name", [name for name in VARIANTS if "cublas" not in name])
@pytest.mark.large
def test_more_than_4_gib_of_result(cupy: Any, name: str) -> None:
    """Integers, so that every element is compared with integer arithmetic, in strips."""
    edge, k = 33_013, 2  # 4.06 GiB
    rng = cupy.random.default_rng(1)
    a, b = (rng.integers(-99, 100, shape).astype(cupy.float32) for shape in ((edge, k), (k, edge)))
    out = cupy.full((edge, edge), cupy.nan, cupy.float32)
    if applies(name, "gram"):
        gram_on_cuda(a, out, variant=name)
        b = a.T
    else:
        gemm_on_cuda(a, b, out, variant=name)
    for first in range(0, edge, 4096):
        rows = slice(first, first + 4096)
        expected = a[rows, :1] * b[:1] + a[rows, 1:] * b[1:]
        assert bool((out[rows] == expected).all()), f"rows {first} and on"


def test_any_strides_and_the_stream_given(cupy: Any) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((58, 62)).astype(np.float32) for _ in range(2))
    stream = cupy.cuda.Stream(non_blocking=True)
    on_a, on_b = cupy.asarray(a), cupy.asarray(b)
    cupy.cuda.get_current_stream().synchronize()
    product, square = gemm(on_a[::2, ::-2], on_b.T[::2, ::2], stream=stream), gram(on_a[:, ::3], stream=stream)
    stream.synchronize()
    check(product.get(), a[::2, ::-2], b.T[::2, ::2])
    check(square.get(), a[:, ::3], a[:, ::3].T)


def test_the_variants_of_an_operation_refuse_the_other(cupy: Any) -> None:
    a = cupy.zeros((3, 3), cupy.float32)
    with pytest.raises(ValueError, match="'naive' does not compute gram"):
        gram_on_cuda(a, None, variant="naive")
    with pytest.raises(TypeError, match="a and b must be arrays of one kind"):
        gemm(a, np.zeros((3, 3), np.float32))


def test_ladders_can_be_run(cupy: Any) -> None:
    for ladder in ladders():
        assert ladder.variants[-1] in ("cublas", "gram_cublas")
        ladder.prepare(ladder.variants[-1])()
        for run in ladder.libraries().values():
            run()
    cupy.cuda.get_current_stream().synchronize()

"""Chunks encoded on a GPU: Blosc's own decoders give the samples back."""

from __future__ import annotations

import itertools

import numcodecs
import numpy as np
import pytest

from pipeline.codecs.packed import ChunkForm, origin_rows

pytestmark = pytest.mark.gpu


def form_of(shape, chunk, codec="lz4"):
    corners = itertools.product(*(range(0, n, size) for n, size in zip(shape, chunk, strict=True)))
    return ChunkForm(codec=codec, chunk=chunk, origins=origin_rows(list(corners), len(chunk)), view=lambda array: array)


def packed(packer, form, image, spare=1 << 14):
    """The encoded chunks; None if they do not fit."""
    import cupy

    from pipeline.engine.devices.packing import table_bytes

    count, first = len(form.origins), table_bytes(len(form.origins))
    out = cupy.full(first + image.nbytes + spare, 0x5A, cupy.uint8)
    packer.launch(form, cupy.asarray(image), out.data, out.nbytes, cupy.cuda.get_current_stream())
    found = out.get()
    *sizes, total = found[: 8 * (count + 1)].view(np.int64).tolist()
    ends = np.cumsum([first, *sizes]).tolist()
    assert total in (-1, sum(sizes))
    assert (found[ends[-1] if total >= 0 else first :] == 0x5A).all()
    return None if total < 0 else [found[begin:end] for begin, end in itertools.pairwise(ends)]


@pytest.mark.sanitize("blocks")
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "chunk"), [((300, 500), (128, 211)), ((512, 1024), (256, 1024)), ((5, 31, 33), (2, 16, 64))], ids=str
)
def test_every_chunk_is_read_back(dtype, shape, chunk, codec):
    from pipeline.engine.devices.packing import Packer

    rng, packer = np.random.default_rng(4), Packer()
    smooth = np.add.outer(np.arange(np.prod(shape[:-1])), np.arange(shape[-1])).reshape(shape) * 3
    for image in (smooth + rng.integers(0, 5, shape), rng.integers(0, 1 << 62, shape)):
        samples = image.astype(dtype)
        form = form_of(shape, chunk, codec)
        padded = np.zeros([-(-n // size) * size for n, size in zip(shape, chunk, strict=True)], dtype)
        padded[tuple(map(slice, shape))] = samples
        for turn in range(2):  # the second time in the memory of the first
            chunks = packed(packer, form, samples, spare=padded.nbytes)
            assert len(chunks) == len(form.origins), turn
            for data, origin in zip(chunks, form.origins[:, -len(shape) :].tolist(), strict=True):
                found = np.frombuffer(numcodecs.blosc.decompress(data.tobytes()), dtype).reshape(chunk)
                part = padded[tuple(slice(first, first + n) for first, n in zip(origin, chunk, strict=True))]
                assert found.tobytes() == part.tobytes()


def test_what_does_not_fit_is_told():
    from pipeline.engine.devices.packing import Packer

    image = np.random.default_rng(1).integers(0, 1 << 16, (512, 512)).astype(np.uint16)
    assert packed(Packer(), form_of(image.shape, (256, 256)), image, spare=-(1 << 12)) is None

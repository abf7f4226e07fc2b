"""Makes zarr decode every chunk within a bound, through the codec registries of zarr and numcodecs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pipeline.codecs.bounded import decode, encoded_limit

# Without a bound of its own, and of the largest chunk.
LARGEST_BYTES = 1 << 30
# numcodecs does not know the chunk. zarr's threads and tasks take over the caller's context.
_limit: ContextVar[int] = ContextVar("limit", default=LARGEST_BYTES)


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    """Bounds the decoding of chunks in this context by their size."""
    token = _limit.set(encoded_limit(nbytes))
    try:
        yield
    finally:
        _limit.reset(token)


@functools.cache
def use_bounded_codecs() -> None:
    """Replace the compressors in both registries. Blosc's decoder also crashes on damaged chunks (`check_blosc`)."""
    import numcodecs  # type: ignore[import-untyped]
    import zarr
    from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
    from zarr.registry import register_codec

    for name, base in (("blosc", BloscCodec), ("gzip", GzipCodec), ("zstd", ZstdCodec)):
        codec = _zarr_codec(name, base)
        register_codec(name, codec)
        zarr.config.set({f"codecs.{name}": f"{codec.__module__}.{codec.__qualname__}"})
    for base in (numcodecs.Blosc, numcodecs.BZ2, numcodecs.GZip, numcodecs.LZ4, numcodecs.LZMA, numcodecs.Zlib,
                 numcodecs.Zstd):  # fmt: skip
        numcodecs.register_codec(_numcodecs_codec(base))


def _zarr_codec(name: str, base: type[Any]) -> type[Any]:
    class Bounded(base):  # type: ignore[misc]
        def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
            limit = encoded_limit(math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize)
            return chunk_spec.prototype.buffer.from_bytes(decode(name, chunk_bytes.as_numpy_array(), limit))

        async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
            import asyncio  # only here: every command imports this module

            return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    Bounded.__name__ = Bounded.__qualname__ = f"Bounded{base.__name__}"
    return Bounded


def _numcodecs_codec(base: type[Any]) -> type[Any]:
    from numcodecs.compat import ensure_contiguous_ndarray, ndarray_copy  # type: ignore[import-untyped]

    class Bounded(base):  # type: ignore[misc]
        codec_id = base.codec_id

        def decode(self, buf: Any, out: Any = None) -> Any:
            options = {"format": self.format, "filters": self.filters} if self.codec_id == "lzma" else {}
            found = decode(self.codec_id, ensure_contiguous_ndarray(buf).view("u1"), _limit.get(), **options)
            return found if out is None else ndarray_copy(found, out)

    Bounded.__name__ = Bounded.__qualname__ = base.__name__
    return Bounded

"""Makes the data sets of the quick start, the benchmarks and some tests: deterministic, two runs have the same bytes.

Three kinds: JPEG images in class folders, shards of framed records, and plain random files of given sizes. Reading them
is the work of `readers.py`.
"""

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image

CLASSES = ("aurora", "cloud", "dune", "ember", "fog", "glacier", "lagoon", "meadow", "nebula", "smoke")

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Sample:
    """One file: its path below the folder of the data set, its bytes, and the xxh3 (64 bits) of its content."""

    path: str
    size: int
    digest: int


def total_bytes(samples: list[Sample]) -> int:
    """Bytes of all the files together."""
    return sum(sample.size for sample in samples)


def make_images(
    folder: Path, *, count: int, seed: int = 0, on_file: Callable[[], object] | None = None
) -> list[Sample]:
    """`count` JPEG files of 60 to 110 KiB in `folder`/<class>/, the same number in each of ten classes."""
    samples = []
    for index in range(count):
        class_index = index % len(CLASSES)
        content = _jpeg(class_index, index, seed)
        samples.append(_write(folder, f"{CLASSES[class_index]}/{index // len(CLASSES):05d}.jpg", content))
        if on_file:
            on_file()
    return samples


def _jpeg(class_index: int, index: int, seed: int) -> bytes:
    """Soft clouds in the colour of the class, with a little grain: about as many bytes per pixel as a photograph."""
    rng = np.random.default_rng((seed, index))
    side = 416 + 8 * int(rng.integers(0, 13))
    tint = np.random.default_rng((seed, 1 << 32, class_index)).integers(0, 128, 3)
    clouds = (rng.integers(0, 128, (7, 7, 3)) + tint).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(clouds).resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
    grain = rng.integers(-14, 15, (side, side, 1), dtype=np.int16)
    image = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_shards(
    folder: Path, images: Path, samples: list[Sample], *, count: int, on_file: Callable[[], object] | None = None
) -> list[Sample]:
    """`count` shards that hold the `samples` of the folder `images` as records (`read_records`), dealt out in turn."""
    shards = []
    for shard in range(count):
        records = [_frame((images / sample.path).read_bytes()) for sample in samples[shard::count]]
        shards.append(_write(folder, f"train-{shard:05d}-of-{count:05d}.rec", b"".join(records)))
        if on_file:
            on_file()
    return shards


def _frame(record: bytes) -> bytes:
    """A record framed as in TFRecord (length, its check sum, data, its check sum), with CRC-32 for masked CRC-32C."""
    length = _LENGTH.pack(len(record))
    return length + _CRC.pack(zlib.crc32(length)) + record + _CRC.pack(zlib.crc32(record))


def read_records(content: bytes) -> Iterator[bytes]:
    """The records of a shard.

    Raises:
        ValueError: a check sum is wrong, or the shard ends within a record.
    """
    offset = 0
    while offset < len(content):
        try:
            (length,) = _LENGTH.unpack_from(content, offset)
            (length_crc,) = _CRC.unpack_from(content, offset + 8)
            record = content[offset + 12 : offset + 12 + length]
            (crc,) = _CRC.unpack_from(content, offset + 12 + length)
        except struct.error as exc:
            raise ValueError(f"the shard ends within the record at offset {offset}") from exc
        if length_crc != zlib.crc32(content[offset : offset + 8]) or crc != zlib.crc32(record):
            raise ValueError(f"corrupted record at offset {offset}")
        yield record
        offset += 16 + length


def make_plain(
    folder: Path, *, count: int, size: int, seed: int = 0, on_file: Callable[[], object] | None = None
) -> list[Sample]:
    """`count` files of `size` random bytes, 1,000 to a folder."""
    samples = []
    for index in range(count):
        rng = np.random.default_rng((seed, size, index))
        content = rng.integers(0, 1 << 64, size // 8 + 1, dtype=np.uint64).tobytes()[:size]
        samples.append(_write(folder, f"{index // 1000:03d}/{index % 1000:03d}.bin", content))
        if on_file:
            on_file()
    return samples


def _write(folder: Path, path: str, content: bytes) -> Sample:
    target = folder / path
    os.makedirs(target.parent, exist_ok=True)
    target.write_bytes(content)
    return Sample(path, len(content), xxhash.xxh3_64_intdigest(content))

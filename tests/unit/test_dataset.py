"""The data sets of scripts/: the same bytes in every run, sizes as promised, and shards whose damage is noticed."""

from pathlib import Path

import pytest
import xxhash

from scripts.lib import dataset

KiB = 1024


@pytest.mark.slow
def test_images_are_deterministic_and_of_the_size_of_photographs(tmp_path: Path) -> None:
    first = dataset.make_images(tmp_path / "a", count=20)
    assert dataset.make_images(tmp_path / "b", count=20) == first
    assert {sample.path.split("/")[0] for sample in first} == set(dataset.CLASSES)
    assert all(55 * KiB < sample.size < 110 * KiB for sample in first)
    for sample in first:
        content = (tmp_path / "a" / sample.path).read_bytes()
        assert (len(content), xxhash.xxh3_64_intdigest(content)) == (sample.size, sample.digest)


def test_a_shard_gives_its_records_back(tmp_path: Path) -> None:
    images = dataset.make_plain(tmp_path / "images", count=5, size=1000)
    shards = dataset.make_shards(tmp_path, tmp_path / "images", images, count=2)
    records = [list(dataset.read_records((tmp_path / shard.path).read_bytes())) for shard in shards]
    originals = [(tmp_path / "images" / image.path).read_bytes() for image in images]
    assert records == [originals[0::2], originals[1::2]]


def test_a_damaged_shard_is_noticed_wherever_the_damage_is(tmp_path: Path) -> None:
    images = dataset.make_plain(tmp_path / "images", count=2, size=20)
    (shard,) = dataset.make_shards(tmp_path, tmp_path / "images", images, count=1)
    good = (tmp_path / shard.path).read_bytes()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 1
        with pytest.raises(ValueError, match="record at offset"):
            list(dataset.read_records(bytes(bad)))
    with pytest.raises(ValueError, match="ends within"):
        list(dataset.read_records(good[:-1]))


def test_plain_files_have_the_size_asked_for(tmp_path: Path) -> None:
    for size in (0, 1, 7, 4097):
        (sample,) = dataset.make_plain(tmp_path / str(size), count=1, size=size)
        assert sample.size == (tmp_path / str(size) / sample.path).stat().st_size == size

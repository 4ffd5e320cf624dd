"""Pairs of artifacts in the cache: built from their parts, named by them, verified, and mended when a part is another file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tktune.build.cache import ArtifactCache
from tktune.build.pairs import pair_digest, parts_of
from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "one.cpp").write_text('extern "C" int one() { return VALUE; }\n')
    (tmp_path / "wrong.cpp").write_text("this is no C++\n")
    return tmp_path


def single(sources: Path, value: int, name: str = "one") -> BuildSpec:
    return BuildSpec(f"{name}-{value}", "shared", sources / f"{name}.cpp", "native", {"VALUE": str(value)})


def pair(*parts: BuildSpec) -> BuildSpec:
    return BuildSpec(
        " + ".join(p.name for p in parts), "pair", parts[0].source, parts[0].arch, {}, parts=parts
    )


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


def test_a_pair_is_built_from_its_parts_each_once(cache: ArtifactCache, sources: Path) -> None:
    one, other = single(sources, 1), single(sources, 2)
    told = []
    outcomes = cache.build(
        [pair(one, other), one, pair(other, one)], on_done=lambda o: told.append(o.spec.name)
    )
    assert all(outcome.ok for outcome in outcomes)
    assert told == ["one-1 + one-2", "one-1", "one-2 + one-1"]
    first, alone, reverse = (outcome.artifact for outcome in outcomes)
    assert first and alone and reverse
    digests = [cache.digest(one), cache.digest(other)]
    assert [part.digest for part in parts_of(first.path, first.sha256)] == digests
    assert first.digest == cache.digest(pair(one, other)) == pair_digest(digests) != reverse.digest
    assert alone.digest == digests[0]
    assert {a.digest for a in cache.entries()} == {first.digest, reverse.digest, *digests}
    found = cache.find(first.digest)
    assert found is not None and found.describes["parts"] == digests
    assert all(part.path.is_file() for part in parts_of(found.path, found.sha256))
    assert cache.verify() == []


def test_the_second_time_nothing_is_built(cache: ArtifactCache, sources: Path) -> None:
    spec = pair(single(sources, 1), single(sources, 2))
    cache.build([spec])
    (again,) = ArtifactCache(cache.root).build([spec])
    assert again.cached and again.seconds == 0.0


def test_a_part_that_does_not_compile_is_the_pairs_failure(cache: ArtifactCache, sources: Path) -> None:
    (outcome,) = cache.build([pair(single(sources, 1), single(sources, 1, "wrong"))])
    assert not outcome.ok and "wrong-1 does not compile" in outcome.error_sentence
    assert not cache.holds(outcome.digest)


def test_an_altered_pair_is_put_aside_and_made_again(cache: ArtifactCache, sources: Path) -> None:
    spec = pair(single(sources, 1), single(sources, 2))
    (made,) = cache.build([spec])
    assert made.artifact is not None
    made.artifact.path.write_text(made.artifact.path.read_text().replace("artifact.so", "elsewhere.so"))
    with pytest.raises(ArtifactError, match="not what was made"):
        parts_of(made.artifact.path, made.artifact.sha256)
    assert [bad.digest for bad in cache.verify()] == [made.digest]
    assert cache.find(made.digest) is None
    (again,) = cache.build([spec])
    assert again.artifact is not None and again.artifact.sha256 == made.artifact.sha256


def test_a_pair_follows_a_part_that_became_another_file(cache: ArtifactCache, sources: Path) -> None:
    one, other = single(sources, 1), single(sources, 2)
    (made,) = cache.build([pair(one, other)])
    assert made.artifact is not None
    place = cache.folder.artifact(cache.digest(one))
    manifest = json.loads((place / "manifest.json").read_text())
    file = place / manifest["path"]
    file.write_bytes(file.read_bytes() + b"\0")  # as another build of the same digest might be
    manifest |= {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest))
    (again,) = ArtifactCache(cache.root).build([pair(one, other)])
    assert again.artifact is not None and again.digest == made.digest
    named = parts_of(again.artifact.path, again.artifact.sha256)
    assert named[0].sha256 == manifest["sha256"] and again.artifact.sha256 != made.artifact.sha256


def test_a_pair_that_is_kept_keeps_its_parts(cache: ArtifactCache, sources: Path) -> None:
    one, other, third = (single(sources, value) for value in (1, 2, 3))
    (made, _) = cache.build([pair(one, other), third])
    gone = cache.gc([made.digest], older_than_s=-1.0)
    assert gone.digests == (cache.digest(third),)
    assert cache.find(made.digest) is not None and cache.find(cache.digest(one)) is not None

"""Thousands of artifacts named at once: the same names, the sources looked at once, and edits seen again afterwards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tktune.build import closure
from tktune.build.cache import ArtifactCache
from tktune.build.reading import once, read_once
from tktune.core.build_spec import BuildSpec


@pytest.fixture
def specs(tmp_path: Path) -> list[BuildSpec]:
    (tmp_path / "unit.h").write_text("constexpr int more = 1;\n")
    source = tmp_path / "unit.cpp"
    source.write_text('#include "unit.h"\nint answer() { return TILE + more; }\n')
    return [BuildSpec(f"unit-{tile}", "shared", source, "native", {"TILE": str(tile)}) for tile in range(20)]


def test_names_are_the_same_inside_and_sources_are_looked_at_once(specs, tmp_path, monkeypatch):
    cache = ArtifactCache(tmp_path / "cache")
    outside = [cache.digest(spec) for spec in specs]
    looks = []
    look = closure._looked_at
    monkeypatch.setattr(closure, "_looked_at", lambda *key: looks.append(key) or look(*key))
    with read_once(), read_once():
        inside = [cache.digest(spec) for spec in specs]
    assert inside == outside and len(set(outside)) == len(specs)
    assert len(looks) == 1


def test_an_edit_is_seen_by_the_next_one_who_reads(specs, tmp_path):
    cache = ArtifactCache(tmp_path / "cache")
    with read_once():
        before = cache.digest(specs[0])
        (tmp_path / "unit.h").write_text("constexpr int more = 2;\n")
        assert cache.digest(specs[0]) == before
    after = cache.digest(specs[0])
    with read_once():
        assert cache.digest(specs[0]) == after != before


def test_other_threads_look_for_themselves():
    found: list[int] = []
    with read_once():
        assert once("what", lambda: 1) == 1 and once("what", lambda: 2) == 1
        other = threading.Thread(target=lambda: found.append(once("what", lambda: 3)))
        other.start()
        other.join()
    assert found == [3] and once("what", lambda: 4) == 4

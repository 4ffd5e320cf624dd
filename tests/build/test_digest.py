"""The digest covers every ingredient, and nothing that does not change the code."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from tktune.build.closure import include_closure
from tktune.build.digest import artifact_digest
from tktune.build.toolchain import Toolchain, detect
from tktune.core.errors import ArtifactError, ToolchainError

GXX = Toolchain("g++", Path("/usr/bin/g++"), "g++ 12.2.0 x86_64", ("-march=znver3", "-mavx2"))


def test_the_same_ingredients_give_the_same_digest_in_another_place(sources, tmp_path):
    first = artifact_digest(sources.spec(), GXX)
    shutil.copytree(sources.folder, tmp_path / "elsewhere")
    moved = dataclasses.replace(
        sources.spec(),
        source=tmp_path / "elsewhere" / "unit.cpp",
        include_dirs=(tmp_path / "elsewhere" / "include",),
    )
    assert artifact_digest(moved, GXX) == first
    assert len(first) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"defines": {"TKT_ANSWER": "42"}},
        {"defines": {"TKT_ANSWER": "41", "MORE": "1"}},
        {"flags": ("-O2",)},
        {"arch": "x86-64-v3"},
    ],
)
def test_each_ingredient_of_the_spec_changes_the_digest(sources, change):
    assert artifact_digest(sources.spec(**change), GXX) != artifact_digest(sources.spec(), GXX)


@pytest.mark.parametrize("change", [{"name": "another"}, {"facts": {"registers": 168}}])
def test_labels_and_predictions_do_not_change_the_digest(sources, change):
    assert artifact_digest(sources.spec(**change), GXX) == artifact_digest(sources.spec(), GXX)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(GXX, version="g++ 13.1.0 x86_64"),
        dataclasses.replace(GXX, flags=("-march=skylake", "-mavx2")),
        dataclasses.replace(GXX, flags=("-march=znver3", "-mavx2", "--param", "l2-cache-size=512")),
    ],
)
def test_compiler_identity_and_resolved_arch_change_the_digest(sources, other):
    assert artifact_digest(sources.spec(), other) != artifact_digest(sources.spec(), GXX)


@pytest.mark.parametrize("name", ["unit.cpp", "near.h", "include/deep.h"])
def test_an_edit_anywhere_in_the_include_closure_changes_the_digest(sources, name):
    before = artifact_digest(sources.spec(), GXX)
    path = sources.folder / name
    path.write_text(path.read_text() + "// edited\n")
    assert artifact_digest(sources.spec(), GXX) != before


def test_an_edit_of_the_same_length_within_one_clock_tick_changes_the_digest(sources):
    header = sources.folder / "include" / "deep.h"
    before = artifact_digest(sources.spec(), GXX)
    stamp = header.stat().st_mtime_ns
    header.write_text("#define DEEP 2\n")
    os.utime(header, ns=(stamp, stamp))
    assert artifact_digest(sources.spec(), GXX) != before


def test_settled_files_are_read_once_and_still_noticed_when_edited(sources):
    header = sources.folder / "include" / "deep.h"
    for path in (header, sources.unit, sources.folder / "near.h"):
        os.utime(path, (1_000_000, 1_000_000))
    before = artifact_digest(sources.spec(), GXX)
    assert artifact_digest(sources.spec(), GXX) == before
    header.write_text("#define DEEP 2\n")
    assert artifact_digest(sources.spec(), GXX) != before


def test_a_header_that_appears_where_it_is_looked_for_first_is_noticed(sources):
    for path in (sources.folder / "include" / "deep.h", sources.unit, sources.folder / "near.h"):
        os.utime(path, (1_000_000, 1_000_000))
    before = artifact_digest(sources.spec(), GXX)
    os.utime(sources.write("deep.h", "#define DEEP 3\n"), (1_000_000, 1_000_000))
    assert artifact_digest(sources.spec(), GXX) != before


def test_the_closure_lists_own_headers_and_no_system_ones(sources):
    found = include_closure(sources.unit, (sources.folder / "include",))
    assert [path.name for path in found] == ["deep.h", "near.h", "unit.cpp"]


def test_the_closure_ends_on_cycles_and_ignores_comments_and_absent_files(sources):
    sources.write("near.h", '#include "unit.cpp"\n// #include "other.h"\n#include "absent.h"\n')
    sources.write("other.h", "")
    found = include_closure(sources.unit, (sources.folder / "include",))
    assert [path.name for path in found] == ["near.h", "unit.cpp"]


def test_an_include_computed_by_a_macro_is_refused(sources):
    sources.write("near.h", "#include CHOSEN_HEADER\n")
    with pytest.raises(ArtifactError, match="CHOSEN_HEADER"):
        include_closure(sources.unit)


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"nowhere\.cpp"):
        include_closure(tmp_path / "nowhere.cpp")


def test_native_is_spelled_out():
    found = detect("g++", "native")
    assert found.flags[0].startswith("-march=")
    assert "-march=native" not in found.flags
    assert len(found.flags) > 5
    assert "g++" in found.version or "gcc" in found.version.lower()
    assert found == detect("g++", "native")


def test_a_missing_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="apt-get install"):
        detect("g++", "native")


def test_a_compiler_that_does_not_answer_is_named(monkeypatch, tmp_path):
    (tmp_path / "g++").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ToolchainError, match="broken"):
        detect("g++", "native")


def test_nvcc_is_found_under_cuda_home_and_among_wheels(monkeypatch, tmp_path):
    gxx = shutil.which("g++")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "g++").symlink_to(gxx)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    wheel = tmp_path / "site" / "nvidia" / "cu13" / "bin"
    home = tmp_path / "home" / "bin"
    for folder, release in ((wheel, "13.1"), (home, "13.2")):
        folder.mkdir(parents=True)
        (folder / "nvcc").write_text(f"#!/bin/sh\necho 'tools, release {release}, V{release}.1'\n")
        (folder / "nvcc").chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    if not Path("/usr/local/cuda/bin/nvcc").exists():
        found = detect("nvcc", "sm_90a")
        assert found.path == wheel / "nvcc"
        assert "release 13.1" in found.version
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert detect("nvcc", "sm_120a").flags == ("-gencode", "arch=compute_120a,code=sm_120a")
    assert "release 13.2" in detect("nvcc", "sm_120a").version
    with pytest.raises(ToolchainError, match="gfx942"):
        detect("nvcc", "gfx942")

"""Memory, time and disk: how many compilers run, and what happens when something runs out."""

from __future__ import annotations

import json
import subprocess

import pytest

from tktune.build import resources
from tktune.build.cache import ArtifactCache
from tktune.build.failures import first_error, for_want_of_memory
from tktune.build.resources import MIB, Measured, job_count, timeout_s
from tktune.core.errors import CacheError


@pytest.mark.parametrize(
    ("cores", "free_mib", "peak_mib", "jobs"),
    [(8, 100_000, 400, 8), (8, 2_512, 400, 5), (8, 600, 400, 1), (8, 100, 400, 1), (2, 100_000, 400, 2)],
)
def test_jobs_are_bounded_by_cores_and_by_free_memory(cores, free_mib, peak_mib, jobs):
    assert job_count(cores, free_mib * MIB, peak_mib * MIB, reserve_bytes=512 * MIB) == jobs


def test_the_time_limit_follows_what_compiles_took(tmp_path):
    assert timeout_s(Measured()) == resources.TIMEOUT_CAP_S
    assert timeout_s(Measured(1, 0.5)) == 60.0
    assert timeout_s(Measured(1, 10.0)) == 200.0
    assert timeout_s(Measured(1, 1000.0)) == resources.TIMEOUT_CAP_S
    assert resources.read_measured(tmp_path / "absent") == Measured()
    assert resources.usable_cores() >= 1
    assert resources.free_bytes() > MIB


def test_what_a_compile_took_is_remembered_for_the_next_run(cache, sources, monkeypatch):
    cache.build([sources.spec(1)])
    (record,) = (cache.root / "measured").iterdir()
    fields = json.loads(record.read_text())
    assert fields["peak_bytes"] > 5 * MIB and fields["seconds"] > 0
    asked = []

    def counted(cores, free, peak, reserve=0):
        asked.append(peak)
        return 1

    monkeypatch.setattr(resources, "job_count", counted)
    ArtifactCache(cache.root).build([sources.spec(2)])
    assert asked == [fields["peak_bytes"]]


def test_a_compile_past_its_time_limit_is_stopped_with_all_its_processes(
    cache, sources, fake_compiler, monkeypatch
):
    monkeypatch.setattr(resources, "timeout_s", lambda measured: 0.2)
    fake = fake_compiler('sleep 600 & echo $! > "$HERE/below"; wait')
    (outcome,) = cache.build([sources.spec(1)])
    assert "did not compile within" in outcome.error_sentence
    below = (fake.folder / "below").read_text().strip()
    state = subprocess.run(["cat", f"/proc/{below}/stat"], capture_output=True, text=True).stdout
    assert not state or state.rpartition(")")[2].split()[0] == "Z"


def test_a_compiler_killed_for_memory_is_tried_again_with_half_the_jobs(cache, sources, fake_compiler):
    fake = fake_compiler(
        'if mkdir "$HERE/killed" 2> /dev/null; then '
        'echo "g++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1; fi'
    )
    outcomes = cache.build([sources.spec(1), sources.spec(2)], jobs=4)
    assert all(outcome.ok for outcome in outcomes)
    assert fake.compiles == 3
    assert len(cache.notes) == 1 and "2 at once" in cache.notes[0]


def test_a_compiler_killed_for_memory_twice_ends_the_batch_and_keeps_the_rest(cache, sources, fake_compiler):
    fake_compiler('case "$*" in *ANSWER=2*) kill -9 $$;; esac')
    with pytest.raises(CacheError, match="want of memory twice") as caught:
        cache.build([sources.spec(1), sources.spec(2)], jobs=1)
    assert "fewer jobs" in str(caught.value)
    assert len(cache.entries()) == 1


def test_a_full_disk_is_named_and_poisons_nothing(cache, sources, fake_compiler):
    fake = fake_compiler('echo "as: /x/unit.o: No space left on device" >&2; exit 1')
    with pytest.raises(CacheError, match="is full") as caught:
        cache.build([sources.spec(1)])
    assert str(cache.root) in str(caught.value) and "TKTUNE_CACHE_DIR" in str(caught.value)
    assert list((cache.root / "building").iterdir()) == []
    assert cache.entries() == []
    (fake.folder / "g++").unlink()
    assert cache.build([sources.spec(1)])[0].ok


def test_a_really_full_disk_is_named_and_poisons_nothing(tmp_path, sources):
    root = tmp_path / "small"
    root.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(root)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        cache = ArtifactCache(root)
        specs = [sources.spec(n) for n in range(20)]
        with pytest.raises(CacheError, match="is full"):
            cache.build(specs)
        assert cache.verify() == []
        assert list((root / "building").iterdir()) == []
    finally:
        subprocess.run(["umount", str(root)], check=True)


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (
            "a\n/x/y/unit.cpp:3:1: error: 'f' was not declared\nmore",
            "unit.cpp:3:1: error: 'f' was not declared",
        ),
        ('k.cu(1): error: identifier "f" is undefined\n', 'k.cu(1): error: identifier "f" is undefined'),
        (
            "ptxas /tmp/k.ptx, line 9; fatal   : Unsupported .version",
            "ptxas k.ptx, line 9; fatal   : Unsupported .version",
        ),
        ("one\nlast words\n", "last words"),
        ("", ""),
    ],
)
def test_the_first_error_is_found(log, first):
    assert first_error(log) == first


@pytest.mark.parametrize(
    ("code", "log", "memory"),
    [
        (-9, "", True),
        (1, "nvcc error   : 'cicc' died due to signal 9 (Kill signal)", True),
        (1, "cc1plus: out of memory allocating 65536 bytes", True),
        (-11, "", False),
        (1, "error: no", False),
        (0, "signal 9", False),
    ],
)
def test_a_death_for_want_of_memory_is_told_from_others(code, log, memory):
    assert for_want_of_memory(code, log) is memory

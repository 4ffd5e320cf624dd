"""Building once, publishing whole, handing out only what was built."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import threading

import pytest

from tktune.build.cache import ArtifactCache
from tktune.build.folder import CacheFolder
from tktune.core.errors import ArtifactError, CacheError, ToolchainError

# The compiler waits until the test lets it go on.
HOLD = 'while [ ! -e "$HERE/go" ]; do sleep 0.02; done'


def answer(artifact) -> int:
    return ctypes.CDLL(str(artifact.path)).answer()


def test_a_built_variant_loads_and_states_what_it_is(cache, sources):
    (outcome,) = cache.build([sources.spec(41)])
    assert outcome.ok and not outcome.cached and not outcome.error_sentence
    assert answer(outcome.artifact) == 42
    assert outcome.seconds > 0 and outcome.peak_bytes > 1 << 20
    manifest = json.loads((outcome.artifact.path.parent / "manifest.json").read_text())
    assert manifest["sha256"] == outcome.artifact.sha256
    assert manifest["describes"]["defines"] == {"TKT_ANSWER": "41"}
    assert manifest["toolchain"]["kind"] == "g++"
    assert manifest["toolchain_digest"] == cache.toolchain(sources.spec()).digest
    assert manifest["built_at"].startswith("20")
    assert cache.find(outcome.digest) == outcome.artifact
    outcome.artifact.verify()
    assert list((cache.root / "building").iterdir()) == []


def test_the_same_batch_again_compiles_nothing(cache, sources, fake_compiler):
    fake = fake_compiler()
    specs = [sources.spec(n) for n in (1, 2, 3)]
    first = cache.build(specs)
    assert [outcome.cached for outcome in first] == [False, False, False]
    assert fake.compiles == 3
    again = ArtifactCache(cache.root).build(specs)
    assert [outcome.cached for outcome in again] == [True, True, True]
    assert [outcome.artifact for outcome in again] == [outcome.artifact for outcome in first]
    assert fake.compiles == 3


def test_specs_that_become_the_same_code_are_compiled_once(cache, sources, fake_compiler):
    fake = fake_compiler()
    seen = []
    outcomes = cache.build([sources.spec(7), sources.spec(7, name="inert")], on_done=seen.append)
    assert fake.compiles == 1
    assert outcomes[0].artifact == outcomes[1].artifact
    assert [outcome.spec.name for outcome in outcomes] == ["unit[7]", "inert"]
    assert seen == outcomes


def test_each_outcome_is_told_as_soon_as_it_is_known(cache, sources, fake_compiler):
    fake = fake_compiler(f'case "$*" in *ANSWER=2*) {HOLD};; esac')

    def told(outcome):
        if outcome.spec.defines["TKT_ANSWER"] == "1":
            fake.gate.touch()  # the held one can only end after this one was told

    assert all(o.ok for o in cache.build([sources.spec(2), sources.spec(1)], jobs=2, on_done=told))


def test_two_processes_that_want_one_digest_compile_it_once(
    cache, sources, fake_compiler, start_builder, until
):
    fake = fake_compiler(HOLD)
    first = start_builder(fake, 5, 6)
    until(lambda: fake.compiles >= 1)
    second = start_builder(fake, 6, 5)
    fake.gate.touch()
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert fake.compiles == 2
    assert sorted(word.split()[0] for out in lines for word in out) == ["built", "built", "cached", "cached"]
    assert {word.split()[1] for word in lines[0]} == {word.split()[1] for word in lines[1]}


def test_two_threads_with_overlapping_batches_end_and_share(cache, sources, fake_compiler):
    fake = fake_compiler()
    specs = [sources.spec(n) for n in range(4)]
    results = {}

    def build(name, order):
        results[name] = ArtifactCache(cache.root).build(order)

    threads = [
        threading.Thread(target=build, args=("up", specs)),
        threading.Thread(target=build, args=("down", specs[::-1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert fake.compiles == 4
    assert [o.artifact for o in results["up"]] == [o.artifact for o in results["down"][::-1]]


def test_a_builder_killed_outright_publishes_nothing_and_frees_the_lock(
    cache, sources, fake_compiler, start_builder, until
):
    fake = fake_compiler(HOLD)
    builder = start_builder(fake, 9)
    until(lambda: fake.compiles == 1)
    digest = cache.digest(sources.spec(9))
    with cache.folder.lock(digest) as lock:
        assert not lock.try_acquire()
    builder.kill()
    builder.communicate(timeout=30)
    compiler = int((fake.folder / "count").read_text())
    until(lambda: _gone(compiler))
    with cache.folder.lock(digest) as lock:
        assert lock.try_acquire()
    assert cache.find(digest) is None
    assert cache.entries() == []
    fake.gate.touch()
    (outcome,) = cache.build([sources.spec(9)])
    assert outcome.ok and not outcome.cached and fake.compiles == 2


def test_an_interrupt_stops_the_compilers_and_leaves_nothing_behind(
    cache, sources, fake_compiler, start_builder, until
):
    fake = fake_compiler(HOLD)
    builder = start_builder(fake, 9)
    until(lambda: fake.compiles == 1)
    builder.send_signal(signal.SIGINT)
    _, errors = builder.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    compiler = int((fake.folder / "count").read_text())
    until(lambda: _gone(compiler))
    assert list((cache.root / "building").iterdir()) == []
    assert list((cache.root / "artifacts").iterdir()) == []


def test_an_exception_in_the_listener_keeps_what_is_published(cache, sources):
    def refuse(outcome):
        raise LookupError(outcome.spec.name)

    with pytest.raises(LookupError):
        cache.build([sources.spec(3)], on_done=refuse)
    assert cache.find(cache.digest(sources.spec(3))) is not None
    assert list((cache.root / "building").iterdir()) == []


@pytest.mark.parametrize("harm", ["truncate", "alter", "manifest", "missing"])
def test_a_bad_artifact_is_put_aside_reported_and_built_again(tmp_path, sources, harm):
    notes = []
    cache = ArtifactCache(tmp_path / "cache", on_note=notes.append)
    (outcome,) = cache.build([sources.spec(1)])
    path = outcome.artifact.path
    content = path.read_bytes()
    if harm == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "alter":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "manifest":
        (path.parent / "manifest.json").write_text("{")
    else:
        path.unlink()
    if harm != "manifest":
        with pytest.raises(ArtifactError):
            outcome.artifact.verify()
    (bad,) = cache.verify()
    assert bad.digest == outcome.digest and bad.reason
    assert cache.find(outcome.digest) is None
    assert len(notes) == 1 and outcome.digest[:12] in notes[0]
    assert cache.verify() == []
    assert len(list((cache.root / "quarantine").iterdir())) == 1
    (again,) = cache.build([sources.spec(1)])
    assert again.ok and not again.cached and answer(again.artifact) == 2


def test_a_compile_error_is_one_sentence_with_its_log_and_is_not_tried_twice(cache, sources, fake_compiler):
    fake = fake_compiler()
    bad = sources.spec("missing_name")
    (outcome,) = cache.build([bad])
    assert not outcome.ok and not outcome.rejected
    assert "missing_name" in outcome.error_sentence and "\n" not in outcome.error_sentence
    assert str(sources.folder) not in outcome.error_sentence
    assert "missing_name" in outcome.log.read_text()
    assert cache.build([bad])[0].error_sentence == outcome.error_sentence
    assert fake.compiles == 1
    assert not ArtifactCache(cache.root).build([bad])[0].ok
    assert fake.compiles == 2
    assert cache.entries() == []


def test_a_failing_neighbour_does_not_stop_the_batch(cache, sources):
    outcomes = cache.build([sources.spec("missing_name"), sources.spec(1), sources.spec(2)])
    assert [outcome.ok for outcome in outcomes] == [False, True, True]


@pytest.mark.parametrize("said", ["exit 0", "touch nothing; kill -11 $$", "printf text > /dev/null; exit 7"])
def test_a_compiler_that_lies_or_dies_gives_a_sentence(cache, sources, fake_compiler, said):
    fake_compiler(said)
    (outcome,) = cache.build([sources.spec(1)])
    assert not outcome.ok and "does not compile" in outcome.error_sentence


def test_a_compiler_that_makes_no_elf_file_gives_a_sentence(cache, sources, fake_compiler):
    fake_compiler('for last; do :; done; echo text > "$last"; exit 0')
    (outcome,) = cache.build([sources.spec(1)])
    assert "no ELF file" in outcome.error_sentence
    assert cache.entries() == []


def test_a_world_writable_cache_is_refused(cache, sources):
    cache.build([sources.spec(1)])
    cache.root.chmod(0o777)
    for attempt in (lambda: cache.build([sources.spec(1)]), lambda: cache.find("0" * 64), cache.verify):
        with pytest.raises(CacheError, match="written by others") as caught:
            attempt()
        assert "chmod go-w" in str(caught.value)


def test_the_cache_is_made_for_its_owner_alone_and_only_when_building(cache, sources):
    assert cache.find("0" * 64) is None and cache.entries() == [] and cache.verify() == []
    assert cache.gc().digests == ()
    assert not cache.root.exists()
    old = os.umask(0)
    try:
        (outcome,) = cache.build([sources.spec(1)])
    finally:
        os.umask(old)
    assert cache.root.stat().st_mode & 0o777 == 0o700
    assert outcome.artifact.path.stat().st_mode & 0o077 == 0


def test_a_cache_that_is_a_file_or_of_another_user_is_refused(tmp_path, sources, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="not a folder"):
        ArtifactCache(tmp_path / "file").find("0" * 64)
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CacheError, match="another user"):
        ArtifactCache(tmp_path / "theirs").build([sources.spec(1)])


def test_a_cache_under_a_file_cannot_be_made_and_says_so(tmp_path, sources):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="TKTUNE_CACHE_DIR"):
        ArtifactCache(tmp_path / "file" / "cache").build([sources.spec(1)])


def test_a_missing_ninja_is_named(cache, sources, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ninja", None)
    with pytest.raises(ToolchainError, match="pip install ninja"):
        cache.build([sources.spec(1)])


def test_entries_and_gc_keep_what_is_wanted_and_drop_the_least_recently_used(cache, sources):
    outcomes = cache.build([sources.spec(n) for n in range(4)])
    digests = [outcome.digest for outcome in outcomes]
    assert sorted(digests) == [artifact.digest for artifact in cache.entries()]
    for age, digest in enumerate(digests):
        os.utime(cache.folder.artifact(digest), (1_000_000 + age, 1_000_000 + age))
    assert cache.find(digests[0]) is not None  # a use: now the most recent
    assert cache.gc().digests == ()
    gone = cache.gc(keep_digests={digests[1]}, older_than_s=3600)
    assert set(gone.digests) == {digests[2], digests[3]} and gone.bytes > 0
    assert cache.gc(max_bytes=10**9).digests == ()
    assert cache.gc(keep_digests={digests[1]}, max_bytes=0).digests == (digests[0],)
    assert [artifact.digest for artifact in cache.entries()] == [digests[1]]


def test_private_folders_of_dead_builders_go_after_an_hour(cache, sources):
    cache.build([sources.spec(1)])
    old, fresh = cache.root / "building" / "1-old", cache.root / "building" / "1-fresh"
    for folder in (old, fresh):
        (folder / "half").mkdir(parents=True)
    os.utime(old, (1_000_000, 1_000_000))
    ArtifactCache(cache.root).build([sources.spec(1)])
    assert not old.exists() and fresh.exists()


def test_the_loser_of_a_publishing_race_leaves_the_winners_artifact(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    folder.create()
    for name in ("first", "second"):
        (tmp_path / "cache" / "building" / name).mkdir()
        (tmp_path / "cache" / "building" / name / "artifact.so").write_text(name)
    assert folder.publish(folder.root / "building" / "first", "d", {})
    assert not folder.publish(folder.root / "building" / "second", "d", {})
    assert (folder.artifact("d") / "artifact.so").read_text() == "first"


def test_a_lock_removed_by_a_cleaner_is_not_taken_for_held(tmp_path):
    folder = CacheFolder(tmp_path / "cache")
    folder.create()
    with folder.lock("d") as cleaner, folder.lock("d") as other:
        assert cleaner.try_acquire() and not other.try_acquire()
        cleaner.remove()
        assert other.try_acquire()


def test_variables_that_would_change_the_code_unsaid_are_kept_from_the_compiler(
    cache, sources, tmp_path, monkeypatch
):
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "stdint.h").write_text("#error planted\n")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path / "planted"))
    assert cache.build([sources.spec(1)])[0].ok


def _gone(pid: int) -> bool:
    try:
        state = subprocess.run(
            ["cat", f"/proc/{pid}/stat"], capture_output=True, text=True, check=True
        ).stdout
    except subprocess.CalledProcessError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


def test_paths_with_spaces_and_dollars_build(tmp_path, sources):
    odd = tmp_path / "a $b 'c'"
    shutil.copytree(sources.folder, odd)
    spec = sources.spec(1, source=odd / "unit.cpp", include_dirs=(odd / "include",))
    assert ArtifactCache(tmp_path / "odd $HOME cache").build([spec])[0].ok

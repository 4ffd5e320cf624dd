"""The file of a recording: what is written is read again, what is not sound is refused, and the page tells all of it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
from pathlib import Path

import pytest
from pydantic import BaseModel
from recorded import recording

from tktune.core.errors import WordsError, WorkError
from tktune.search import recording_form
from tktune.search.effort import PROFILES
from tktune.search.recording import Recording
from tktune.search.recording_form import form_of, read_recording, write_recording
from tktune.search.replay import replay, study_of
from tktune.search.replay_rooms import Disturbance

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


@pytest.mark.parametrize("name", ["a.json.xz", "a.json.gz", "a.json"])
def test_a_recording_is_read_as_it_was_written(tmp_path, name):
    path = tmp_path / "new folder" / name
    write_recording(recording(), path)
    found = read_recording(path)
    written = form_of(recording()).model_dump(exclude={"made_at"})
    assert form_of(found).model_dump(exclude={"made_at"}) == written
    assert list(found.trials) == list(recording().trials) and found.default == recording().default
    assert found.builds == recording().builds and found.parameters == recording().parameters
    assert [child.name for child in path.parent.iterdir()] == [name]


def test_a_name_that_does_not_say_how_it_is_packed_is_refused(tmp_path):
    with pytest.raises(WordsError, match=r"\.json\.xz"):
        write_recording(recording(), tmp_path / "a.txt")


def test_a_folder_that_cannot_be_written_is_an_error_of_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot be written"):
        write_recording(recording(), tmp_path / "file" / "a.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "not a recording"),
        (b"{}", "not a recording"),
        (lzma.compress(b"{}")[:-5], "cannot be read"),
        (gzip.compress(b"{}", mtime=0)[:-9], "cannot be read"),
        (b'{"format": "tktune-recording", "version": 2}', "version 2"),
        (b'{"format": "tktune-recording", "version": 1}', "not a sound recording"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(WordsError, match=said):
        read_recording(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WordsError, match="No such file"):
        read_recording(tmp_path / "none.json")


def changed(tmp_path: Path, change) -> Recording:
    content = json.loads(form_of(recording()).model_dump_json())
    change(content)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    return read_recording(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(colour="red"), "colour"),
        (lambda c: c["configs"][0].pop("run_s"), "run_s"),
        (lambda c: c["configs"][0].update(run_s=-1.0), "run_s"),
        (lambda c: c["configs"][0].update(status="fine"), "status"),
        (lambda c: c["configs"][0].update(build=999), "999"),
        (lambda c: c["configs"][0].update(launch={"num_comm_sms": 77, "order": "slot"}), "does not fit"),
        (lambda c: c["default"].update(TILE=17), "lacks its default"),
        (
            lambda c: [one.update(status="wrong", time_us=None) for one in c["configs"]],
            "no config that was timed",
        ),
        (lambda c: c["problem"].update(world=9), "world = 9"),
        (lambda c: c["device"].pop("backend"), "backend"),
    ],
)
def test_what_is_not_sound_is_refused_with_what_is_wrong(tmp_path, change, said):
    with pytest.raises(WordsError, match=said):
        changed(tmp_path, change)


def forms(form: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        name: value
        for name, value in vars(recording_form).items()
        if isinstance(value, type) and issubclass(value, form) and value is not form
    }


def test_every_field_of_the_form_is_in_the_page():
    page = PAGE.read_text()
    known = forms(recording_form.Form)
    assert len(known) == 6
    for name, form in known.items():
        for key in form.model_fields:
            assert f"`{key}`" in page, (name, key)


def test_the_version_of_the_page_is_the_version_of_the_form():
    assert f"version {recording_form.VERSION}" in PAGE.read_text()


def test_the_recording_of_a_cpu_that_ships_is_sound_and_large_enough():
    path = PAGE.parents[1] / "bench" / "recordings" / "cpu_dispatch.json.xz"
    found = read_recording(path)
    assert path.stat().st_size <= 200 * 1024
    assert len(found.trials) >= 1000 and len(found.builds) >= 50
    assert found.device.backend == "cpu" and {p.kind for p in found.parameters} == {"build", "launch"}
    early = dataclasses.replace(study_of(found, PROFILES["full"]), trials=120)
    ended = replay(found, early, disturbance=Disturbance(noise=0.02))
    assert ended.gap is not None and ended.winner_us <= 1.05 * ended.default_us

"""`tktune run --replay` and `--record`: a study against a recording, and a recording of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tktune.build.cache import ArtifactCache
from tktune.cli.listeners import listener_for
from tktune.cli.output import make_writable, print_line
from tktune.cli.progress import Progress
from tktune.cli.tuning import SpokenStop, present, result_object, verdicts
from tktune.core.errors import WordsError
from tktune.report.text import aligned, count_text, ratio_text, seconds_text, time_text
from tktune.search.record import record
from tktune.search.recording import Recording
from tktune.search.recording_form import check_name, write_recording
from tktune.search.replay import Replayed, replay
from tktune.search.replay_rooms import DRIFT_S, Disturbance, VirtualClock
from tktune.search.study import Study

STOPPING = "Stopping: what is measured is kept, and the same command continues the recording."


def disturbance(noise: float, failures: float, drift: str | None, seed: int) -> Disturbance:
    """What the replay options ask for. `drift` is "SHARE" or "SHARE@SECONDS". Raises `WordsError`."""
    share, seconds = 0.0, DRIFT_S
    if drift is not None:
        word, at, after = drift.partition("@")
        try:
            share, seconds = float(word), float(after) if at else DRIFT_S
        except ValueError:
            share = float("nan")
        if not (-0.5 <= share <= 10 and 0 <= seconds <= 1e7):
            raise WordsError(
                f"--replay-drift {drift!r} is not SHARE or SHARE@SECONDS.", "Write for example 0.1@30."
            )
    return Disturbance(noise, failures, share, seconds, seed)


def replay_and_tell(
    recording: Recording, study: Study, how: Disturbance, command: str, as_json: bool
) -> None:
    """Replay, show it like any run, and say what the choice is truly worth; exit code 1 without a winner."""
    clock = VirtualClock()
    progress = Progress(1, study.seconds, clock)
    with listener_for(progress, as_json) as listener:
        stop = SpokenStop(listener.stopping)
        with stop.on_signals():
            ended = replay(recording, study, disturbance=how, listener=listener, stop=stop, clock=clock)
    if as_json:
        print_line({"event": "replayed", "command": command, **replayed_object(ended)})
    else:
        print(f"\n{verdicts([ended.result], served=False)}\n\n{truth(ended)}")
    if ended.result.winner is None:
        raise typer.Exit(1)


def truth(ended: Replayed) -> str:
    """The winner's true time against the recording's optimum, and what was charged, for people."""
    rows: list[list[Any]] = []
    if ended.default_us is not None:
        rows.append(
            [
                "default",
                time_text(ended.default_us),
                ratio_text(ended.default_us / ended.optimum_us),
                ended.result.default,
            ]
        )
    if ended.winner_us is not None:
        rows.append(["winner", time_text(ended.winner_us), f"{ended.gap or 0.0:+.1%}", ended.result.winner])
    rows.append(["optimum", time_text(ended.optimum_us), "", ended.optimum])
    charged = (
        f"Charged {seconds_text(ended.charged_s)}: {seconds_text(ended.build_s)} of compiling "
        f"{count_text(ended.result.builds, 'artifact')}, {seconds_text(ended.run_s)} of measuring."
    )
    return f"In truth:\n{aligned(rows, right=(1, 2), indent='  ')}\n{charged}"


def replayed_object(ended: Replayed) -> dict[str, Any]:
    """What `--json` prints at the end of a replay."""
    return {
        "results": [result_object(ended.result)],
        "winner_us": ended.winner_us,
        "optimum": dict(ended.optimum),
        "optimum_us": ended.optimum_us,
        "default_us": ended.default_us,
        "gap": ended.gap,
        "charged_s": ended.charged_s,
        "build_s": ended.build_s,
        "run_s": ended.run_s,
    }


def record_and_write(study: Study, store_url: str, cache_root: Path, path: Path, as_json: bool) -> None:
    """Measure every feasible config and write the recording; exit code 1 when the user stopped it before."""
    check_name(path)
    make_writable(path)
    present(study.device)
    progress = Progress(1, None)
    with listener_for(progress, as_json) as listener:
        stop = SpokenStop(lambda _: listener.stopping(STOPPING))
        cache = ArtifactCache(cache_root, on_note=listener.say)
        with stop.on_signals():
            recording = record(study, store_url, cache, listener=listener, stop=stop)
    if recording is None:
        raise typer.Exit(1)
    write_recording(recording, path)
    best = recording.optimum
    if as_json:
        print_line(
            {
                "event": "recorded",
                "file": str(path),
                "configs": len(recording.trials),
                "builds": len(recording.builds),
                "optimum": dict(best.config),
                "optimum_us": best.time_us,
            }
        )
    else:
        print(
            f"Recorded {count_text(len(recording.trials), 'config')} of {count_text(len(recording.builds), 'build')} "
            f"in {path}; the fastest is {best.config}, {time_text(best.time_us)}."
        )

"""The working half of `tktune run`: checks the device, listens to the driver, writes the report, says the verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tktune.build.cache import ArtifactCache
from tktune.cli.listeners import listener_for
from tktune.cli.output import make_writable, print_line, write_text
from tktune.cli.progress import Progress
from tktune.cli.selection import file_name
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import DeviceAbsent
from tktune.core.sharing import refuse_timing
from tktune.moe.parts import is_layer
from tktune.report.collect import collect
from tktune.report.markdown import markdown
from tktune.report.model import lookup_command
from tktune.report.text import aligned, ratio_text, time_text
from tktune.report.usage import usage_text
from tktune.search.budget import StopSignal
from tktune.search.driver import tune
from tktune.search.results import TuneResult
from tktune.search.study import Study
from tktune.store.results import Store

STOPPING = "Stopping: the finalists are still verified. Press Ctrl-C again to stop at once; what is measured is kept."


def tune_and_report(
    study: Study, store_url: str, cache_root: Path, report_dir: Path, command: str, as_json: bool
) -> None:
    """Tune, write the report beside the others in `report_dir`, and say where it is.

    Raises `DeviceAbsent`, `NothingFeasible` and what the rooms below raise; exit code 1 when a problem has no
    winner.
    """
    device = present(study.device)
    refuse_timing(device, "A run")
    path = report_dir / f"{file_name(study.name)}.md"
    make_writable(path)
    progress = Progress(len(study.problems), study.seconds)
    with listener_for(progress, as_json) as listener:
        stop = SpokenStop(listener.stopping)
        cache = ArtifactCache(cache_root, on_note=listener.say)
        with stop.on_signals():
            results = tune(study, store_url, cache, listener=listener, stop=stop)
    if not as_json:
        print(f"\n{verdicts(results)}\n")
    with Store.open(store_url, mode="ro") as store:
        policy, problems = study.policy(device), frozenset(study.problems)
        report = collect(
            store,
            title=f"tktune report: {study.name}",
            command=command,
            wanted=lambda facts: (
                facts.problem in problems and facts.device == device and facts.policy == policy
            ),
            pins=study.pins,
            order=study.problems,
        )
    write_text(path, markdown(report))
    if as_json:
        print_line({"event": "report", "file": str(path), "results": [result_object(r) for r in results]})
    else:
        runs = [p.run_time for p in report.problems if p.run_time is not None]
        if runs and any(result.measured or result.verified for result in results):
            print(usage_text(runs))
        print(f"The report is in {path}.")
    if any(result.winner is None for result in results):
        raise typer.Exit(1)


def present(name: str) -> DeviceClass:
    """The device class called `name`, if this machine has it. Raises `DeviceAbsent`."""
    device = device_class(name)
    if device.backend == "cuda":
        from tktune.core.device_cuda import cuda_device_classes, gpus_for

        if not gpus_for(device):
            found = ", ".join(sorted({str(d) for d in cuda_device_classes()})) or "no GPU"
            raise DeviceAbsent(
                f"This machine has no {name} ({device}); it has {found}.",
                "Use --device cpu, or add --dry-run to see the space.",
            )
    return device


class SpokenStop(StopSignal):
    """A stop that says what will happen. `say` runs inside a signal handler, so it only writes to a descriptor or
    sets a field."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def request(self) -> None:
        again = self.requested
        super().request()
        if not again:
            self._say(STOPPING)


def verdicts(results: list[TuneResult], *, served: bool = True) -> str:
    """Each problem's winner against its default, for people. `served`: a lookup finds it from now on."""
    lines = []
    for result in results:
        lines.append(str(result.problem))
        if result.winner is None:
            lines.append(f"  {result.sentence or 'No config finished.'}")
            continue
        same = result.winner == result.default
        rows: list[list[Any]] = [["default", time_text(result.default_us), "", result.default]]
        if same:
            rows[0][0] = "winner (the default)"
        else:
            rows.append(["winner", time_text(result.time_us), ratio_text(result.speedup), result.winner])
        lines += [aligned(rows, right=(1, 2), indent="  "), f"  {result.reason}"]
        if is_layer(result.problem):
            lines.append("  the default of a layer is the winners of both its kernels, each found alone")
        if served:
            asked = lookup_command(result.problem, result.device, result.policy.name)
            lines.append(f"  exact from now on: {asked}")
    return "\n".join(lines)


def result_object(result: TuneResult) -> dict[str, Any]:
    """What `--json` prints of one problem's result."""
    return {
        "problem": result.problem.key,
        "winner": None if result.winner is None else dict(result.winner),
        "time_us": result.time_us,
        "default": dict(result.default),
        "default_us": result.default_us,
        "speedup": result.speedup,
        "reason": result.reason,
        "sentence": result.sentence,
        "resumed": result.resumed,
        "measured": result.measured,
        "builds": result.builds,
        "seconds": result.seconds,
        "stopped": result.stopped,
        "ended": result.ended,
    }

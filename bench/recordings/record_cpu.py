"""Record the CPU space of cpu_dispatch.toml, and keep for each config the quietest trial so far.

Other programs only ever make a launch slower, and they come in bursts, so the smaller of two medians that were measured
minutes apart is the truer one. Each call is one pass over all configs; cpu_dispatch.json.xz beside this file, where it is
there, takes part in the choice. Call it again at a quieter moment, or remove the file to begin anew.

    .venv/bin/python bench/recordings/record_cpu.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

from tktune.build.cache import ArtifactCache
from tktune.search.record import record
from tktune.search.recording import quieter
from tktune.search.recording_form import read_recording, write_recording
from tktune.search.study import load_study

HERE = Path(__file__).parent
FILE = HERE / "cpu_dispatch.json.xz"


def main() -> None:
    study = load_study(HERE / "cpu_dispatch.toml")
    with tempfile.TemporaryDirectory() as folder:
        found = record(study, f"sqlite:///{folder}/pass.db", ArtifactCache(Path(folder) / "cache"))
    assert found is not None
    print(f"{len(found.trials)} configs, load {os.getloadavg()[0]:.1f}")
    if FILE.exists():
        before = read_recording(FILE)
        gains = [
            1 - new.time_us / old.time_us
            for new, old in zip(found.trials.values(), before.trials.values(), strict=True)
            if new.time_us and old.time_us and new.time_us < old.time_us
        ]
        found = quieter(found, before)
        if gains:
            print(f"{len(gains)} configs were quieter now, half of them by at least {median(gains):.1%}")
    write_recording(found, FILE)
    print(f"the fastest: {found.optimum.config}, {found.optimum.time_us:.1f} µs")


if __name__ == "__main__":
    main()

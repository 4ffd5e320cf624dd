"""Record the CPU space of cpu_dispatch.toml: the median of several passes over all configs, at times when nothing else runs.

    .venv/bin/python bench/recordings/record_cpu.py [--passes 7] [--minutes 14] [--wait 10] [--busy 0.06] [--folder FOLDER]

A pass takes about two minutes on two cores (the first half a minute more, for its builds), and measures each config once,
with the median of its launches. Passes follow each other, so the samples of one config lie minutes apart; each pass is
corrected for its pace, and of each config the median stands (`tktune.search.passes`). One lucky sample is never the optimum.

Before each pass it waits until other programs use less than --busy of all cores, --wait minutes at most. A pass during
which they used more is thrown away and done again. Passes are kept in --folder as they end: called again, it goes on
with those that are there. cpu_dispatch.json.xz beside this file is written once there are at least five; exit code 1
when there are fewer.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from tktune.build.cache import ArtifactCache
from tktune.search.passes import lead, paces, spread, typical
from tktune.search.record import record
from tktune.search.recording import Recording
from tktune.search.recording_form import read_recording, write_recording
from tktune.search.study import load_study

HERE = Path(__file__).parent
FILE = HERE / "cpu_dispatch.json.xz"
FEWEST = 5
_LOOK_S = 5.0  # how long others are watched before a pass


class Others:
    """What share of all cores other programs have used since it was made or last asked."""

    def __init__(self) -> None:
        self._at = self._now()

    def share(self) -> float:
        wall, busy, own = (now - was for now, was in zip(self._now(), self._at, strict=True))
        self._at = self._now()
        return max(0.0, (busy - own) / max(wall, 1e-9) / (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        """Seconds of wall, of all cores at work, and of this process with its children that ended."""
        # user, nice, system, idle, waiting, interrupts, soft interrupts, stolen (proc(5))
        ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), busy, sum(one.ru_utime + one.ru_stime for one in used)


def wait_for_quiet(busy: float, minutes: float) -> bool:
    """Whether other programs came to use less than `busy` of the cores within `minutes`."""
    until, told = time.monotonic() + 60 * minutes, False
    while True:
        others = Others()
        time.sleep(_LOOK_S)
        share = others.share()
        if share < busy:
            return True
        if time.monotonic() >= until:
            return False
        if not told:
            print(
                f"Other programs use {share:.0%} of the cores; waiting for less than {busy:.0%}.", flush=True
            )
            told = True


def one_pass(folder: Path) -> Recording:
    """Each config once. Artifacts are shared between passes, so only the first one builds."""
    study = load_study(HERE / "cpu_dispatch.toml")
    with tempfile.TemporaryDirectory() as scratch:
        found = record(study, f"sqlite:///{scratch}/pass.db", ArtifactCache(folder / "cache"))
    assert found is not None
    return found


def gather(words: argparse.Namespace) -> list[Path]:
    """The files of passes, those of earlier calls among them, until there are enough or the time is up."""
    began, longest = time.monotonic(), 0.0
    while len(done := sorted(words.folder.glob("pass_*.json.xz"))) < words.passes:
        left_s = 60 * words.minutes - (time.monotonic() - began)
        if left_s < longest:
            print(f"{left_s / 60:.1f} minutes are left, too few for another pass.")
            break
        if not wait_for_quiet(words.busy, min(words.wait, left_s / 60)):
            print("This machine did not become quiet. Close other programs, and call this again: it goes on.")
            break
        others, at = Others(), time.monotonic()
        found = one_pass(words.folder)
        share, took = others.share(), time.monotonic() - at
        longest = max(longest, took)
        stands = share < words.busy
        if stands:
            write_recording(found, words.folder / f"pass_{len(done):02d}.json.xz")
        print(
            f"pass {len(done) + 1}: {took:.0f} s, others used {share:.1%}, "
            f"fastest {found.optimum.time_us:.1f} µs" + ("" if stands else "; thrown away"),
            flush=True,
        )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=14.0, help="no pass begins that would end later")
    parser.add_argument("--wait", type=float, default=10.0, help="minutes to wait for quiet before a pass")
    parser.add_argument("--busy", type=float, default=0.06, help="share of the cores that others may use")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tktune_cpu_passes")
    words = parser.parse_args()
    if words.passes < FEWEST:
        parser.error(f"a recording is the median of at least {FEWEST} passes")
    words.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = gather(words)
    if len(files) < FEWEST:
        print(
            f"There are {len(files)} passes in {words.folder}, and at least {FEWEST} are wanted: call this again."
        )
        return 1
    passes = [read_recording(file) for file in files]
    whole = typical(passes)
    write_recording(whole, FILE)
    by, _ = lead(whole)
    print("paces: " + " ".join(f"{pace:.3f}" for pace in paces(passes)))
    print(f"one pass differs from the median of {len(passes)} by {spread(passes):.1%}")
    print(f"the fastest: {whole.optimum.config}, {whole.optimum.time_us:.1f} µs; the next is {by:.2%} slower")
    return 0


if __name__ == "__main__":
    sys.exit(main())

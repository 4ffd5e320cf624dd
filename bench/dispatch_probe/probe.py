"""Dispatch ⊕ grouped GEMM on two GPUs: builds variants in parallel, checks them against an fp32 reference, and sweeps
the split of SMs against NCCL all-gather + index_select + torch._grouped_mm. A short table comes last.

    python bench/dispatch_probe/probe.py --out OUT [--shapes B,D] [--check-only] [--rehearse] [--seconds 400]

Every wait is bounded: kernels by their spin limit and the abort word, ranks by `--seconds` and a kill.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plan import REHEARSAL, SPLITS, configs_of, form_of, problem_of

from tktune.build.toolchain import detect
from tktune.core.device_cuda import cuda_device_classes
from tktune.families.base import family
from tktune.families.control_page import ControlPage

HERE = Path(__file__).resolve().parent
GRACE_S = 90.0  # beyond --seconds before the ranks are killed
FAREWELL_S = 20.0  # that one rank has when the other has failed


def build(spec: Any, folder: Path, source: Path) -> dict[str, Any]:
    nvcc = detect("nvcc", spec.arch)
    cubin = folder / (re.sub(r"\W", "_", f"{spec.name} {source}") + ".cubin")
    command = [str(nvcc.path), "-cubin", "-std=c++20", "-lineinfo", *nvcc.flags, "-Xptxas", "-v"]
    command += [f"-D{name}={value}" for name, value in spec.defines.items()]
    begin = time.monotonic()
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"BUILD FAILED {spec.name}\n{done.stderr[-1500:]}")
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    if spills:
        print(f"SPILLS {spills} bytes {spec.name}")
    return {
        "path": str(cubin),
        "sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
        "seconds": round(time.monotonic() - begin, 2),
    }


def build_all(work: list[tuple[str, Any]], arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    bench = family("dispatch_gemm")
    wanted: dict[str, tuple[Any, Any]] = {}
    for shape, device in work:
        problem = problem_of(shape, arguments.layout)
        space = bench.space(problem, device)
        for name, config in configs_of(problem, device, arguments.set).items():
            if name.startswith("old") and not arguments.old:
                continue
            part = space.build_part(config)
            wanted[f"{name} {device.arch}"] = (part, bench.build_spec(part, problem, device))
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        jobs = [
            (
                spec,
                folder,
                arguments.old / "kernels/dispatch_gemm.cu" if key.startswith("old") else spec.source,
            )
            for key, (_, spec) in wanted.items()
        ]
        built = list(pool.map(lambda job: build(*job), jobs))
    return {
        key: {**made, "part": dict(part)}
        for (key, (part, _)), made in zip(wanted.items(), built, strict=True)
    }


def join(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The slowest rank of each iteration, then the median."""
    joined: dict[str, Any] = {}
    for shape in found[0]:
        times = [one.get(shape, {}).get("times", {}) for one in found]
        joined[shape] = {
            "verdicts": [one.get(shape, {}).get("verdicts", {}) for one in found],
            "median_us": {
                key: round(statistics.median(map(max, *(one[key] for one in times))), 2)
                for key in times[0]
                if all(key in one for one in times)
            },
        }
    return joined


def table(joined: dict[str, Any]) -> str:
    lines = []
    for shape, result in joined.items():
        t = result["median_us"]
        fused = {key: time for key, time in t.items() if key.startswith("fused|")}
        if not fused:
            lines.append(f"{shape}: {result['verdicts']}")
            continue
        comp = {key: time for key, time in t.items() if key.startswith("comp|")}
        serial = t.get("final serial", t["serial"])
        final_alone = [v for key, v in t.items() if key.startswith("final comp|") or key == "final peer"]
        alone = min(final_alone or [t["peer"], *comp.values()])
        lines.append(
            f"{shape}: serial {serial:.0f} (all-gather {t['all-gather']:.0f}, gather {t['gather']:.0f}, "
            f"GEMM {t['GEMM']:.0f}), torch {t['peer']:.0f} | GEMM alone "
            + ", ".join(f"{key[5:]} {time:.0f}" for key, time in sorted(comp.items()))
        )
        for form in ("gathered", "indexed"):
            mine = {key: time for key, time in fused.items() if form_of(key.split("|")[1]) == form}
            if mine:
                finals = {key: t[f"final {key}"] for key in mine if f"final {key}" in t}
                lines += form_lines(form, mine, finals, t, serial, alone)
    return "\n".join(lines)


def ranking(joined: dict[str, Any], most: int = 16) -> str:
    """For the set `beside`: the finalists, then the fastest of the sweep."""
    lines = []
    for shape, result in joined.items():
        t = result["median_us"]
        if "serial" not in t:
            lines.append(f"{shape}: {result['verdicts']}")
            continue
        serial = t.get("final serial", t["serial"])
        comp = {key[5:]: round(time) for key, time in t.items() if key.startswith("comp|")}
        final_comp = [time for key, time in t.items() if key.startswith("final comp|")]
        lines.append(
            f"{shape}: serial {serial:.0f}, torch {t['peer']:.0f}, alone {comp}, at the end {final_comp}"
        )
        lines += [
            f"  {key} {time:.0f}"
            for key, time in t.items()
            if key.startswith(("comm|", "ungated|", "final ungated|"))
        ]
        for prefix in ("final fused|", "fused|"):
            found = sorted((time, key) for key, time in t.items() if key.startswith(prefix))
            lines += [f"  {time:6.1f} ({serial / time:.3f}) {key}" for time, key in found[:most]]
    return "\n".join(lines)


def form_lines(
    form: str,
    fused: dict[str, float],
    finals: dict[str, float],
    times: dict[str, float],
    serial: float,
    alone: float,
) -> list[str]:
    """The best fused time of a form, and its curves over the split."""
    best = min(finals or fused, key=lambda key: (finals or fused)[key])
    _, name, launch = best.split("|")
    time_us = (finals or fused)[best]
    comm = {key: time for key, time in times.items() if key.startswith(f"comm|{form}|")}
    lines = [
        f"  {form.upper()} {time_us:.1f} µs {name} {launch} = serial / {serial / time_us:.2f} = alone × "
        f"{time_us / alone:.3f}"
    ]
    told: dict[str, dict[int, float]] = {}
    for prefix, found in (("comm", comm), ("fused", fused)):
        for key, us in found.items():
            words = json.loads(key.split("|")[2])
            split = words.pop("num_comm_sms")
            if prefix == "fused" and words.get("wave", 1) != 1:
                continue
            curve = told.setdefault(f"{prefix} {json.dumps(words)}", {})
            curve[split] = min(us, curve.get(split, us))
    for label, curve in told.items():
        lines.append(f"    {label}: " + " ".join(f"{c}:{us:.0f}" for c, us in sorted(curve.items())))
    names = sorted({key.split("|")[1] for key in fused})
    by_name = {n: min(time for key, time in fused.items() if key.split("|")[1] == n) for n in names}
    lines.append("    best by tile: " + ", ".join(f"{n} {time:.0f}" for n, time in by_name.items()))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shapes", default="small,A,B,C,D")
    parser.add_argument("--layout", default="enk", choices=("enk", "ekn"))
    parser.add_argument("--splits", default=",".join(map(str, SPLITS)))
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--set", default="split", choices=("split", "beside"), help="plan.py, or beside.py")
    parser.add_argument("--old", type=Path, help="csrc/ of before, for variants named old")
    parser.add_argument("--rehearse", action="store_true", help="also the sm_120a class on mma.sync")
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    devices = cuda_device_classes()
    if len(devices) < 2:
        sys.exit("Two GPUs are needed.")
    work = [(shape, devices[0]) for shape in arguments.shapes.split(",")]
    if arguments.rehearse:
        work += [(shape, REHEARSAL) for shape in arguments.shapes.split(",")]
    folder = Path(tempfile.mkdtemp())
    built = build_all(work, arguments, folder)
    print(f"built {len(built)}, slowest {max(b['seconds'] for b in built.values())} s", flush=True)

    page = ControlPage.create(2)
    fds = [[os.memfd_create(f"rank-{r}") for r in range(2)] for _ in work]
    words = {
        "control_fd": page.fd,
        "fds": fds,
        "work": [(shape, dataclasses.asdict(device)) for shape, device in work],
        "built": built,
        "layout": arguments.layout,
        "set": arguments.set,
        "splits": [int(c) for c in arguments.splits.split(",")],
        "iterations": arguments.iterations,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "check_only": arguments.check_only,
        "store": str(folder / "store"),
        "out": str(arguments.out),
    }
    (folder / "words.json").write_text(json.dumps(words))
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "rank.py"), str(folder / "words.json"), str(rank)],
            env=environment,
            pass_fds=(page.fd, *(fd for pair in fds for fd in pair)),
        )
        for rank in range(2)
    ]
    end = time.monotonic() + arguments.seconds + GRACE_S
    failed = False
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > end:
            page.abort()
            print("KILLED: the ranks did not end in time", flush=True)
            time.sleep(3)
            for rank in ranks:
                rank.kill()
        if not failed and any(rank.poll() not in (None, 0) for rank in ranks):
            failed, end = True, min(end, time.monotonic() + FAREWELL_S)
            page.abort()
        time.sleep(0.2)
    for rank in range(2):
        if (report := page.report(rank)) is not None:
            print(f"SPIN REPORT {report.sentence}")
    files = [arguments.out / f"rank{rank}.json" for rank in range(2)]
    if not all(file.exists() for file in files):
        sys.exit("A rank left nothing.")
    joined = join([json.loads(file.read_text()) for file in files])
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": devices[0].arch,
        "command": "python " + " ".join(sys.argv),
        "policy": "graph launch, L2 flushed, meeting of both ranks before each iteration, slowest rank, medians",
    }
    (arguments.out / "dispatch_probe.json").write_text(json.dumps(facts | {"shapes": joined}, indent=1))
    print(ranking(joined) if arguments.set == "beside" else table(joined))
    sys.exit(max(abs(rank.returncode) for rank in ranks) != 0)


if __name__ == "__main__":
    main()

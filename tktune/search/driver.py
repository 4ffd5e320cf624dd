"""`tune`: from a study to verified winners in the store. The only room that decides; it holds no device context."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import DeviceAbsent, WordsError
from tktune.search.budget import StopSignal
from tktune.search.events import Listener, Silent
from tktune.search.problem_run import ProblemRun
from tktune.search.results import Rooms, TuneResult
from tktune.search.start import start_configs
from tktune.search.study import Study
from tktune.search.turn import measuring_turn
from tktune.store.results import Store


def tune(
    study: Study,
    store_url: str,
    cache: ArtifactCache,
    *,
    listener: Listener | None = None,
    stop: StopSignal | None = None,
    rooms: Rooms | None = None,
    device: DeviceClass | None = None,
) -> list[TuneResult]:
    """Tune every problem of `study`; the same call again continues where the last one ended, however it ended.

    >>> tune(load_study("quickstart"), database_url(), ArtifactCache(cache_root()))     # doctest: +SKIP

    Every trial is committed when it ends. Runs that share a cache measure one after the other. `device` overrides the
    study's. Raises `NothingFeasible` before anything is measured when a problem has no feasible config, `WordsError`
    for a start that is infeasible, `DeviceAbsent`, and what store, cache, compiler and gang raise; what was measured
    until then stays. A problem in which every config fails is a result with a sentence.
    """
    listener, stop = listener or Silent(), stop or StopSignal()
    results: list[TuneResult] = []
    with problem_runs(study, store_url, cache, listener, stop, rooms or Rooms(), device) as runs:
        for run in runs:
            results.append(run.run())
            if stop.requested:
                break
    return results


@contextlib.contextmanager
def problem_runs(
    study: Study,
    store_url: str,
    cache: ArtifactCache,
    listener: Listener,
    stop: StopSignal,
    rooms: Rooms,
    device: DeviceClass | None,
) -> Iterator[Iterator[ProblemRun]]:
    """One run for each problem of `study`, made when it is its turn, while this process may measure; none when the
    user stopped while another run was measuring. Raises as `tune` does."""
    device = device or present_device(study.device)
    _refuse_untimed_plan(study, device)
    spaces = []
    for problem in study.problems:
        family = rooms.family(study.family)
        space = family.space(problem, device)
        space = space.restrict(study.pins) if study.pins else space
        space.default_config()  # raises NothingFeasible
        start_configs(space, study.start_from)  # raises WordsError
        spaces.append((family, space))
    run_id = uuid.uuid4().hex
    with Store.open(store_url) as store, measuring_turn(cache.root, listener, stop) as mine:
        lost = frozenset(row.id for row in store.reap(run_id)) if mine else frozenset()
        try:
            yield (
                ProblemRun(study, space, family, store, cache, rooms, run_id, listener, stop, lost)
                for family, space in (spaces if mine else [])
            )
        finally:
            store.abandon(run_id)  # what an interrupt left open, wherever it struck


def _refuse_untimed_plan(study: Study, device: DeviceClass) -> None:
    """Raises `WordsError` where `include_plan` would count nothing."""
    if study.policy(device).include_plan and (device.backend != "cuda" or study.family != "dispatch_gemm"):
        raise WordsError(
            f"include_plan counts the plans that dispatch_gemm builds on a GPU, and {study.name} tunes {study.family} on "
            f"{device}.",
            "Leave include_plan out of the study.",
        )


def present_device(name: str) -> DeviceClass:
    """The device class called `name`, if this host has one. Raises `DeviceAbsent` otherwise."""
    wanted = device_class(name)
    if wanted.backend != "cuda":
        return wanted
    from tktune.core.device_cuda import cuda_device_classes

    present = [found for found in cuda_device_classes() if found.arch == wanted.arch]
    if not present:
        raise DeviceAbsent(
            f"The study asks for {wanted}, and this host has no {wanted.arch} device.",
            "Use --device cpu, or --dry-run to see its feasible set.",
        )
    return present[0]

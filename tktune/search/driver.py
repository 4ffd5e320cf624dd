"""`tune`: from a study to verified winners in the store. The only room that decides; it holds no device context."""

from __future__ import annotations

import uuid

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import DeviceAbsent
from tktune.search.budget import StopSignal
from tktune.search.events import Listener, Silent
from tktune.search.problem_run import ProblemRun
from tktune.search.results import Rooms, TuneResult
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

    Every trial is committed when it ends. Runs that share a cache measure one after the other. `device` overrides the study's. Raises `NothingFeasible` before anything
    is measured when a problem has no feasible config, `DeviceAbsent`, and what store, cache, compiler and gang
    raise; what was measured until then stays. A problem in which every config fails is a result with a sentence.
    """
    listener = listener or Silent()
    stop = stop or StopSignal()
    rooms = rooms or Rooms()
    device = device or present_device(study.device)
    spaces = []
    for problem in study.problems:
        family = rooms.family(study.family)
        space = family.space(problem, device)
        space = space.restrict(study.pins) if study.pins else space
        space.default_config()  # raises NothingFeasible
        spaces.append((family, space))
    run_id = uuid.uuid4().hex
    results: list[TuneResult] = []
    with Store.open(store_url) as store, measuring_turn(cache.root, listener, stop) as mine:
        if not mine:
            return results
        lost = frozenset(row.id for row in store.reap(run_id))
        for family, space in spaces:
            run = ProblemRun(study, space, family, store, cache, rooms, run_id, listener, stop, lost)
            results.append(run.run())
            if stop.requested:
                break
    return results


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

"""`tune`: from a study to verified winners in the store. The only room that decides; it holds no device context."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import DeviceAbsent, WordsError
from tktune.core.sharing import refuse_timing
from tktune.moe.parts import FAMILY_NAME, is_layer
from tktune.search.account import Account
from tktune.search.aside import Aside
from tktune.search.budget import StopSignal
from tktune.search.collecting import all_looked_at
from tktune.search.events import Listener, Silent
from tktune.search.gangs import Gangs
from tktune.search.layer_study import at_their_turn, refuse_starts
from tktune.search.place import remembered
from tktune.search.problem_run import ProblemRun
from tktune.search.results import Rooms, TuneResult
from tktune.search.start import start_configs
from tktune.search.study import Study
from tktune.search.turn import measuring_turn
from tktune.store.results import Store

# Threads of this process that wait for its interpreter get it after so many seconds: a rank's reply must not wait for the
# preparation of the next problem.
_TURN_S = 0.00005


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
    for a start that is infeasible and where ranks may share GPUs, `DeviceAbsent`, and what store, cache, compiler and gang raise; what was measured
    until then stays. A problem in which every config fails is a result with a sentence.
    """
    listener, stop = listener or Silent(), stop or StopSignal()
    results: list[TuneResult] = []
    with problem_runs(study, store_url, cache, listener, stop, rooms or Rooms(), device) as runs:
        for number, run in enumerate(runs):
            results.append(run.run(runs[number + 1] if number + 1 < len(runs) else None))
            if stop.requested:
                return results
        for run in runs.layers:
            results.append(run.run())
            if stop.requested:
                break
    return results


class Runs(list[ProblemRun]):
    """One run a problem. `layers` are those whose spaces hang on what the others find: each is made when it is its turn."""

    layers: Iterator[ProblemRun] = iter(())


@contextlib.contextmanager
def problem_runs(
    study: Study,
    store_url: str,
    cache: ArtifactCache,
    listener: Listener,
    stop: StopSignal,
    rooms: Rooms,
    device: DeviceClass | None,
) -> Iterator[Runs]:
    """One run for each problem of `study`, while this process may measure; none when the user stopped while another run
    was measuring. Raises as `tune` does."""
    device = device or present_device(study.device)
    refuse_timing(device, "A run")
    _refuse_untimed_plan(study, device)
    spaces = []
    for problem in study.problems:
        family = rooms.family(study.family_of(problem))
        space = family.space(problem, device)
        pins = study.pins_of(problem)
        space = space.restrict(pins) if pins else space
        if is_layer(problem):
            refuse_starts(study)
        else:
            space.default_config()  # raises NothingFeasible
            start_configs(space, () if study.family == FAMILY_NAME else study.start_from)  # raises WordsError
        spaces.append((family, space))
    run_id = uuid.uuid4().hex
    policy, overlap = study.policy(device), rooms.overlap and device.backend != "cpu"
    account = Account(rooms.clock)
    with contextlib.ExitStack() as life:
        store = life.enter_context(Store.open(store_url))
        mine = life.enter_context(measuring_turn(cache.root, listener, stop))
        lost = frozenset(row.id for row in store.reap(run_id)) if mine else frozenset()
        life.callback(store.abandon, run_id)  # what an interrupt left open, wherever it struck
        aside = None
        if overlap:
            life.enter_context(_short_turns())
            life.enter_context(all_looked_at())
            aside = life.enter_context(Aside.begun())
        gangs = Gangs(
            lambda problem, seat: rooms.make_gang(problem, device, policy, device_indices=seat),
            lambda problem: list(rooms.seats(problem, device))[: study.gangs],
            account,
            threads=overlap,
        )
        life.enter_context(gangs)
        spaces = spaces if mine else []
        name_of = remembered(cache.digest)
        shared = (store, cache, rooms, run_id, listener, stop, lost, gangs, account, name_of, aside)
        runs = Runs(
            ProblemRun(study, space, family, *shared)
            for family, space in spaces
            if not is_layer(space.problem)
        )
        layers = [(family, space) for family, space in spaces if is_layer(space.problem)]
        runs.layers = (
            ProblemRun(study, space, family, *shared)
            for family, space in at_their_turn(layers, study, store, listener)
        )
        try:
            yield runs
        finally:
            for run in runs:
                run.preparation.forget()


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
    from tktune.core.device_cuda import cuda_device_classes, gpus_for

    present = [found for found in cuda_device_classes() if found.arch == wanted.arch]
    if not present and gpus_for(wanted):  # a rehearsal
        return wanted
    if not present:
        raise DeviceAbsent(
            f"The study asks for {wanted}, and this host has no {wanted.arch} device.",
            "Use --device cpu, or --dry-run to see its feasible set.",
        )
    return present[0]

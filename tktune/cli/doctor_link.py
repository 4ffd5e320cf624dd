"""What `tktune doctor` knows of the link: facts that the store has, or a measurement now that the store then keeps."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tktune.cli.db import open_existing
from tktune.cli.doctor_text import Check, KnownLink, topology_lines
from tktune.core.device import DeviceClass
from tktune.core.errors import GangError, TktuneError, ToolchainError, WordsError
from tktune.core.problem import MAX_WORLD
from tktune.core.sharing import refuse_timing
from tktune.core.topology_cuda import Topology, topology
from tktune.families.link_model import LinkFacts, link_facts
from tktune.report.text import count_text

AGAIN = "Measure it with: tktune doctor --measure."
Listen = Callable[[str], None]


@dataclass(frozen=True)
class LinkReport:
    """What is said of the GPUs of this host together: `link` None where nothing is known."""

    checks: tuple[Check, ...]
    topology: Topology | None = None
    link: KnownLink | None = None


def report(url: str, cache_root: Path, measure: bool | None, listen: Listen) -> LinkReport:
    """The link of this host's first device class. `measure` None: measure when the store has nothing of it."""
    from tktune.core.device_cuda import cuda_device_classes

    devices = cuda_device_classes()
    found = topology() if devices else None
    if found is None:
        return LinkReport((Check("link", None, "no GPU: nothing to measure"),) if measure else ())
    device = devices[0]
    seen = _topology_check(found)
    known = stored(url, device)
    if measure is False or (measure is None and known is not None):
        return LinkReport((seen, _known_check(known)), found, known)
    indices = [index for index, one in enumerate(devices) if one == device][:MAX_WORLD]
    fresh, check = _measured(url, cache_root, device, indices, found, listen)
    return LinkReport((seen, check), found, fresh or known)


def stored(url: str, device: DeviceClass) -> KnownLink | None:
    """The newest stored facts of a device class that this version understands; the database's own check tells why a
    database cannot be read.
    """
    try:
        store = open_existing(url)
        if store is None:
            return None
        with store:
            rows = store.links(device)
    except TktuneError:
        return None
    for row in rows:
        facts = link_facts(row.facts)
        if facts is not None:
            return KnownLink(facts, row.driver, row.toolchain, row.host, row.measured_at)
    return None


def keep(url: str, device: DeviceClass, toolchain: tuple[str, str, str], known: KnownLink) -> None:
    """Store facts beside the device class, making the database where there is none. `toolchain`: kind, version, digest.

    Raises `DatabaseError`.
    """
    from tktune.store.results import Store

    with Store.open(url) as store:
        kind, version, digest = toolchain
        built_by = store.toolchain_id(kind, version, digest)
        store.add_link(device, built_by, known.facts.to_json(), known.driver, known.host)


def _measured(
    url: str, cache_root: Path, device: DeviceClass, indices: list[int], found: Topology, listen: Listen
) -> tuple[KnownLink | None, Check]:
    """Facts measured now and what to say of it."""
    from tktune.build.folder import CacheFolder

    lacking = _lacking()
    if lacking is not None:
        return None, lacking
    folder = CacheFolder(cache_root)
    try:
        refuse_timing(device, "The link")
        folder.create()
        with folder.lock("measuring") as turn:  # the lock that runs take
            if not turn.try_acquire():
                said = "not measured: a run is measuring on this machine"
                return None, Check("link", None, said, f"Wait until it ends. {AGAIN}")
            return _surveyed(url, cache_root, device, indices, found, listen)
    except (ToolchainError, WordsError) as error:
        return None, Check("link", None, f"not measured: {error.sentence}", error.way_out)
    except TktuneError as error:
        return None, Check("link", False, f"not measured: {error.sentence}", error.way_out)


def _surveyed(
    url: str, cache_root: Path, device: DeviceClass, indices: list[int], found: Topology, listen: Listen
) -> tuple[KnownLink | None, Check]:
    from tktune.build.cache import ArtifactCache
    from tktune.gang.link_survey import survey

    cache = ArtifactCache(cache_root)
    world = len(indices) if found.all_reach(indices) else 1
    alone = ""
    listen(f"Measuring {count_text(world, 'GPU')}; this takes about half a minute at most.")
    try:
        made = survey(world, device, cache, device_indices=indices[:world], listen=listen)
    except GangError as error:
        if world == 1:
            raise
        alone = f"The GPUs cannot be measured together: {error.sentence}"
        listen(alone)
        made = survey(1, device, cache, device_indices=indices[:1], listen=listen)
    missing = (*([alone] if alone else []), *made.missing)
    known = KnownLink(
        made.facts,
        found.driver,
        made.toolchain.version,
        socket.gethostname(),
        time.time(),
        made.seconds,
        made.gates,
        missing,
    )
    tool = made.toolchain
    if not made.facts.curves:
        return None, Check("link", False, "; ".join(missing) or "nothing could be measured", AGAIN)
    try:
        keep(url, device, (tool.kind, tool.version, tool.digest), known)
    except TktuneError as error:
        missing = (*missing, f"It is not kept: {error.sentence}")
    said = "; ".join([known.provenance + _only_local(made.facts), *missing])
    return known, Check("link", not missing, said, f"{missing[0]} {AGAIN}" if missing else "")


def _only_local(facts: LinkFacts) -> str:
    return ", local parts only: no peer" if facts.world == 1 else ""


def _known_check(known: KnownLink | None) -> Check:
    if known is None:
        return Check("link", None, "not measured yet", AGAIN)
    return Check("link", True, known.provenance + _only_local(known.facts))


def _topology_check(found: Topology) -> Check:
    if found.gpus == 1:
        return Check("topology", None, f"one GPU: no link to measure, driver {found.driver}")
    return Check("topology", True, f"{'; '.join(topology_lines(found))}; driver {found.driver}")


def _lacking() -> Check | None:
    """What measuring needs and is not installed."""
    for module, package in (("torch", "torch"), ("cuda.bindings", "'tktune[cuda]'")):
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            return Check(
                "link",
                None,
                f"not measured: {module} is not installed",
                f"Install it: pip install {package}.",
            )
    return None

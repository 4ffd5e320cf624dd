"""What the search of one problem needs before it begins: the builds of its space, what is expected of its configs, the chooser.

All of it can be made ready aside, beside the problem before. Nothing here measures, builds or writes rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tktune.build.cache import ArtifactCache
from tktune.build.reading import read_once
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.space import Space
from tktune.families.base import Family
from tktune.families.base import family as family_named
from tktune.moe.parts import is_layer
from tktune.search.aside import Aside
from tktune.search.choosing import Asked, Chooser
from tktune.search.collecting import laid_aside
from tktune.search.costs import Costs
from tktune.search.pace import Pace
from tktune.search.place import BuildPlace, places_of
from tktune.search.results import Rooms
from tktune.search.sampler import ConfigSampler
from tktune.search.samplers import SAMPLERS
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import TrialKey

if TYPE_CHECKING:
    from tktune.search.coordinates import Floats
    from tktune.search.estimating import Estimating


class Preparation:
    """Made ready when it is asked for, or before, where threads work `aside`; `key` says under which key the problem's rows
    stand."""

    def __init__(
        self,
        study: Study,
        space: Space,
        family: Family,
        store: Store,
        cache: ArtifactCache,
        rooms: Rooms,
        name_of: Callable[[BuildSpec], str],
        key: Callable[[], TrialKey],
        aside: Aside | None,
    ) -> None:
        self._study = study
        self._space = space
        self._family = family
        self._store = store
        self._cache = cache
        self._rooms = rooms
        self._name_of = name_of
        self._key = key
        self._aside = aside
        self._estimating: Estimating | None = None
        self._ready: Future[None] | None = None
        self._chosen: Future[tuple[Costs, Chooser]] | None = None
        # Where the driver waits for its ranks, looks hold nobody up, and the same seed and times give the same choices.
        self.pace = Pace() if aside is None else Pace(rooms.clock)

    @cached_property
    def places(self) -> dict[Config, BuildPlace]:
        """Every build of the feasible set, in its order."""
        return places_of(self._space, self._family, self._name_of)

    @cached_property
    def estimates_us(self) -> Floats:
        """(configs,): what the family's cost model says of every feasible config, with what is known of the device's links."""
        from tktune.search.estimating import estimates_us

        configs = self._space.feasible.configs
        found = None if self._estimating is None else self._estimating.result(len(configs))
        return (
            estimates_us(self._family, self._space, self._link_facts(), configs) if found is None else found
        )

    # Aside.

    def begin(self) -> None:
        """Let what another process can do be under way, unless it is made ready already."""
        if self._ready is None:
            self._begin_estimating()

    def make_ready(self) -> None:
        """Enumerate the space and what follows from it alone, aside."""
        if self._aside is not None:
            self._ready = self._aside.ready.submit(self._make_ready)

    def choose(self, jobs: int) -> None:
        """Make the chooser for `jobs` compilers, aside, once: what was measured of neighbouring problems until now speaks in
        it."""
        if self._aside is not None and self._chosen is None:
            self._chosen = self._aside.ready.submit(self._make_chooser, jobs)

    def wait(self) -> None:
        """Until it is ready, if it was begun."""
        if self._ready is not None:
            self._ready.result()

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Where the driver works beside its ranks, the objects of a space are many and for good."""
        return contextlib.nullcontext() if self._aside is None else laid_aside()

    def forget(self) -> None:
        """Let go of what is large, and end what is under way: a study may have many problems."""
        for name in ("places", "estimates_us"):
            self.__dict__.pop(name, None)
        self._ready = self._chosen = None
        if self._estimating is not None:
            self._estimating.close()
            self._estimating = None

    def _make_ready(self) -> None:
        self._begin_estimating()
        with self.undisturbed(), read_once():
            assert self._space.feasible.members
            for place in self.places.values():
                assert place.digest
            assert len(self.estimates_us)

    def _begin_estimating(self) -> None:
        """Where the driver works beside its ranks, have the cost model asked by another process; a family of a caller's making
        is known to this one alone."""
        if (
            self._aside is not None
            and self._rooms.family is family_named
            and not is_layer(self._space.problem)
        ):
            from tktune.search.estimating import Estimating

            study, problem = self._study, self._space.problem
            name, pins = study.family_of(problem), study.pins_of(problem)
            self._estimating = Estimating(name, self._space, self._link_facts(), pins)

    def _link_facts(self) -> list[Mapping[str, Any]]:
        return [row.facts for row in self._store.links(self._space.device)]

    # The chooser.

    def chooser(self, jobs: int) -> tuple[Costs, Chooser]:
        """What decides what is measured next, and the costs that it weighs with. `jobs` compilers work at once."""
        return self._make_chooser(jobs) if self._chosen is None else self._chosen.result()

    def _make_chooser(self, jobs: int) -> tuple[Costs, Chooser]:
        costs = Costs(jobs)
        with self.undisturbed():
            return costs, self._chooser(costs)

    def _chooser(self, costs: Costs) -> Chooser:
        """The study's sampler over all configs, weighed where it has a model."""
        rows = self._space.feasible.configs
        build_of = {config: build for build, place in self.places.items() for config in place.points}
        if self._rooms.make_sampler is not None:
            sampler, prior = self._rooms.make_sampler(rows, self._study.seed), None
        elif self._study.sampler == "model":
            sampler, prior = self._model(rows)
        else:
            sampler, prior = SAMPLERS[self._study.sampler](rows, self._study.seed), None
        from tktune.search.gains import GainChooser, GainModel

        if not isinstance(sampler, GainModel):
            return Asked(sampler, build_of)
        with read_once():
            held = [build for build, place in self.places.items() if self._cache.holds(place.digest)]
        return GainChooser(rows, build_of, sampler, costs, held, prior=prior, pace=self.pace)

    def _model(self, rows: Sequence[Config]) -> tuple[ConfigSampler, Floats | None]:
        """Our sampler, and the log microseconds expected of the rows before any is measured, where something is known: what
        the family's cost model says of them, and what was measured of neighbouring problems and other device classes."""
        import numpy as np

        from tktune.search.feasible_sampler import ModelSampler
        from tktune.search.prior import in_store, log_prior

        fits = None if self._aside is None else self._aside.fits
        elsewhere = in_store(self._store, self._key(), self._family)
        estimates = self.estimates_us if np.ptp(self.estimates_us) > 0 else None
        if not elsewhere and estimates is None:
            return ModelSampler(rows, self._study.seed, None, fits), None
        prior = log_prior(rows, estimates, elsewhere)
        return ModelSampler(rows, self._study.seed, prior, fits), prior

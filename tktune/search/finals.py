"""From a finished search to the stored winner: who the finalists are, their verification, the attribution.

Measuring and arithmetic are in `finalists`, `judging` and `attribution`; here is what is asked of them and filed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tktune.core import status
from tktune.core.config import Config
from tktune.search import attribution
from tktune.search.account import WAITING
from tktune.search.attribution import Attribution, attribution_of
from tktune.search.budget import Budget
from tktune.search.building import Builder
from tktune.search.events import Note, WinnerChosen
from tktune.search.finalists import (
    Arm,
    Finalist,
    FinalsPlan,
    Verified,
    resources_of,
    verify,
)
from tktune.search.found import Found
from tktune.search.heats import entrants, run_heats
from tktune.search.measuring import Bench
from tktune.search.results import TuneResult
from tktune.search.resume import REFUTED, VERIFIED, VERIFYING, Known
from tktune.store.rows import Role, VerificationRow, WinnerRow

if TYPE_CHECKING:
    from tktune.search.problem_run import ProblemRun

_ROUNDS_WHEN_STOPPED = 5
_TRIES = 3  # how often verification starts over with the next best when all its finalists fail
HEATS = "heats"  # the kind of the event that keeps what heats measured
_HEATS_SHARE = 0.3  # of the seconds left when they begin
_ATTRIBUTION_SHARE = 0.4  # of the seconds left for verification and attribution


class Finals:
    """The end of one problem's run. `standing` is the winner that stood when it began."""

    def __init__(
        self,
        run: ProblemRun,
        bench: Bench,
        builder: Builder,
        budget: Budget,
        found: Found,
        known: Known,
        standing: WinnerRow | None,
    ) -> None:
        self._problem_run = run
        self._bench = bench
        self._builder = builder
        self._budget = budget
        self._found = found
        self._known = known
        self._standing = standing
        self._default = run.default
        self._listener = run.listener

    def run(self) -> TuneResult:
        """Verify unless nothing has changed since the winner was, attribute unless that is stored. Raises as gang and
        store do."""
        rows = self._stored()
        verified = None
        if rows is None:
            verified = self._verify()
            rows = [] if verified is None else verified.rows
        chosen = next((row for row in rows if row.chosen), None)
        if chosen is None:
            return self._result(None, None, None, verified)
        default_us = next((row.time_us for row in rows if row.config == self._default), None)
        band = verified.verdict.band if verified is not None and verified.verdict is not None else None
        self._listener.on_event(
            WinnerChosen(
                self._problem_run.problem,
                chosen.config,
                chosen.time_us,
                self._default,
                default_us,
                band,
                chosen.reason,
            )
        )
        return self._result(chosen, default_us, self._attribute(chosen.config, verified), verified)

    def _stored(self) -> list[VerificationRow] | None:
        """The session that chose the standing winner, when it is still the last word."""
        standing, run = self._standing, self._problem_run
        if standing is None or self._found.measured or standing.config not in run.space.feasible.members:
            return None
        if standing.policy.digest != run.policy.digest or standing.verified_at < self._known.last_ended_at:
            return None
        if standing.artifact_digest != run.place(standing.config).digest:
            return None
        rows = [row for row in run.store.verifications(run.key) if row.session_id == standing.session_id]
        return rows if any(row.chosen for row in rows) else None

    # Verification.

    def _verify(self) -> Verified | None:
        """Verify the best configs; while all of them fail, the next best. None when there is nothing to verify."""
        failed: set[Config] = set()
        verified: Verified | None = None
        for _ in range(_TRIES):
            finalists = self._finalists(failed)
            if not finalists:
                break
            self._bench.event(
                VERIFYING,
                f"Verification of {len(finalists)} finalists begins.",
                {
                    "problem": self._problem_run.problem.digest,
                    "configs": [dict(finalist.config) for finalist in finalists],
                },
            )
            verified = verify(self._bench.gang, finalists, self._plan(), self._listener)
            failed |= {self._refuted(arm) for arm in verified.failed}
            if verified.verdict is not None and self._file(verified):
                return verified
            failed |= set() if verified.verdict is None else {verified.verdict.config}
        return None

    def _file(self, verified: Verified) -> bool:
        """Commit a session; False when the chosen config was found wrong elsewhere and must not be."""
        run, verdict = self._problem_run, verified.verdict
        assert verdict is not None
        try:
            run.store.add_verification(run.key, run.run_id, verified.rows)
        except ValueError as error:
            self._listener.on_event(Note(f"{verdict.config} is not chosen: {error}."))
            return False
        self._bench.event(
            VERIFIED,
            verdict.reason,
            {
                "session_id": run.run_id,
                "problem": run.problem.digest,
                "band": verdict.band,
                "noise": verified.noise,
                "rounds": verified.rounds,
                "statistic": "best of each round" if verified.by_best else "median of each round",
            },
        )
        return True

    def _refuted(self, arm: Arm) -> Config:
        """Keep what ended a finalist: a wrong output is filed as a verdict, anything else as an event."""
        config, artifact = arm.finalist.config, arm.finalist.artifact
        if arm.end == status.WRONG:
            self._bench.file(config, artifact.digest, status.WRONG, arm.sentence)
        sentence = f"The finalist {config} ended as {arm.end} and is out: {arm.sentence}"
        self._bench.event(REFUTED, sentence, {"config": dict(config), "artifact_digest": artifact.digest})
        self._listener.on_event(Note(sentence))
        return config

    def _finalists(self, failed: set[Config]) -> list[Finalist]:
        """The default, the standing winner and the best of the search, each once, those that failed left out."""
        times = {config: us for config, us in self._found.times_us.items() if config not in failed}
        if not times:
            return []
        roles: dict[Config, Role] = {}
        if self._default in times:
            roles[self._default] = "default"
        if self._standing is not None and self._standing.config in times:
            roles.setdefault(self._standing.config, "previous")
        for config in self._fastest(times, failed):
            roles.setdefault(config, "finalist")
        return self._made(roles)

    def _fastest(self, times: Mapping[Config, float], failed: set[Config]) -> list[Config]:
        """The fastest of the search: by single measurements, and by heats where these cannot tell."""
        places, found = self._problem_run.study.finalists, self._found
        ranked = sorted(times, key=lambda config: (times[config], config.digest))
        hopefuls = entrants(ranked, times.__getitem__, places, found.noise, found.moved)
        if len(hopefuls) <= places or self._problem_run.stop.requested:
            limit = times[ranked[0]] * found.margin
            return [config for config in ranked[:places] if times[config] <= limit]
        sentence = (
            f"{len(hopefuls)} configs are too close to tell apart by one measurement each on this machine: they run in "
            f"heats, and the {places} fastest are verified."
        )
        self._listener.on_event(Note(sentence))
        runners = self._made(dict.fromkeys(hopefuls, "finalist"))
        up = self._time_is_up_after(_HEATS_SHARE)
        fastest, arms = run_heats(self._bench.gang, runners, places, self._plan(), up)
        measured = [{"config": dict(arm.finalist.config), "samples_us": arm.samples} for arm in arms]
        self._bench.event(
            HEATS, sentence, {"problem": self._problem_run.problem.digest, "measured": measured}
        )
        failed |= {self._refuted(arm) for arm in arms if not arm.ok}
        return [one.config for one in fastest]

    def _made(self, roles: Mapping[Config, Role]) -> list[Finalist]:
        """Those of the configs whose artifact there is."""
        self._build(list(roles))
        finalists = []
        for config, role in roles.items():
            place = self._problem_run.place(config)
            if place.artifact is not None:
                resources = resources_of(place.artifact, place.spec.facts, config)
                finalists.append(Finalist(config, place.build, place.artifact, role, resources))
        return finalists

    def _build(self, configs: list[Config]) -> None:
        """Have the artifacts of configs that were measured by an earlier run."""
        places = {place.build: place for place in map(self._problem_run.place, configs)}
        missing = {build: place.spec for build, place in places.items() if place.artifact is None}
        if not missing:
            return
        with self._problem_run.account.driver(WAITING):
            outcomes = self._builder.build(missing)
        for build, outcome in outcomes.items():
            places[build].artifact = outcome.artifact
            if outcome.artifact is None:
                self._listener.on_event(Note(outcome.error_sentence))

    def _plan(self) -> FinalsPlan:
        policy, stopped = self._problem_run.policy, self._problem_run.stop.requested
        rounds = self._problem_run.study.rounds
        rounds = min(rounds, _ROUNDS_WHEN_STOPPED) if stopped else rounds
        return FinalsPlan(
            self._bench.plan.gate_routings,
            policy.routing_seeds,
            policy.first_iterations,
            self._time_is_up_after(1 - _ATTRIBUTION_SHARE),
            rounds,
            rounds if stopped else 3 * rounds,
        )

    def _time_is_up_after(self, share: float) -> Callable[[], bool]:
        """Whether this share of the seconds left now is used up, as a question to ask later."""
        left_s = self._budget.left_s
        if left_s is None:
            return lambda: False
        until = self._budget.run_s + max(0.0, left_s) * share
        return lambda: self._budget.run_s >= until

    # Attribution and the result.

    def _attribute(self, winner: Config, verified: Verified | None) -> Attribution | None:
        """The stored attribution of the winner, or a new one by the statistic that chose it; none when the user
        stopped the run."""
        run, place = self._problem_run, self._problem_run.place(winner)
        rows = [
            row
            for row in run.store.attributions(run.key)
            if row.config == winner and row.artifact_digest == place.digest
        ]
        stored = attribution_of([row for row in rows if row.session_id == rows[-1].session_id], winner)
        if stored is not None or run.stop.requested:
            return stored
        finalist = next((one for one in self._finalist(winner)), None)
        if finalist is None:
            return None
        measured, rows, notes = attribution.attribute(
            self._bench.gang,
            finalist,
            place.points,
            run.policy.routing_seeds[0],
            run.policy.first_iterations,
            self._time_is_up_after(1.0),
            verified is not None and verified.by_best,
        )
        for sentence in notes:
            self._listener.on_event(Note(sentence))
        if rows:
            run.store.add_attribution(run.key, run.run_id, rows)
        return measured

    def _finalist(self, config: Config) -> list[Finalist]:
        self._build([config])
        place = self._problem_run.place(config)
        if place.artifact is None:
            return []
        return [Finalist(config, place.build, place.artifact, "finalist", ())]

    def _result(
        self,
        chosen: VerificationRow | None,
        default_us: float | None,
        measured: Attribution | None,
        verified: Verified | None,
    ) -> TuneResult:
        run = self._problem_run
        return TuneResult(
            run.problem,
            run.device,
            run.policy,
            None if chosen is None else chosen.config,
            None if chosen is None else chosen.time_us,
            self._default,
            default_us,
            "" if chosen is None else chosen.reason,
            len(self._known.final),
            self._found.measured,
            self._found.built,
            self._budget.run_s,
            run.stop.requested,
            self._found.reason,
            verified is not None,
            measured,
            self._no_winner() if chosen is None else "",
        )

    def _no_winner(self) -> str:
        """Why there is no winner, and the way out."""
        run = self._problem_run
        ends = Counter(row.status for row in run.store.trials(run.key))
        if not ends:
            return f"{run.problem} was stopped before anything was measured; the same command continues."
        if self._found.times_us:
            return (
                f"{run.problem} has no winner: configs finished, and every finalist failed when it was measured "
                "again. Run the same command again, and look at its events with: tktune report."
            )
        said = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        return (
            f"No config of {run.problem} finished: {said}. Read the sentence of each trial with: tktune report, "
            "and correct the kernel, the constraints or the device before you run it again."
        )

"""From a study file to a verified winner on the embedded CPU backend: real compiler, real ranks, real store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.search.driver import tune
from tktune.search.events import BuildStarted, Event, Note, Resumed, SpaceReady, Tee, TrialDone, WinnerChosen
from tktune.search.study import load_study
from tktune.store.results import Store

DISPATCH = """
name = "tiny dispatch"
family = "dispatch_gemm"
[problem]
hidden = 128
cols = 64
experts = 4
top_k = 2
tokens = 32
world = 2
pad = 32
[policy]
iterations = 5
[search]
trials = 8
seconds = 120
finalists = 2
[pins]
COL_BLOCK = 64
RED_BLOCK = 64
STAGES = 2
CONSUMER_WARPS = 1
"""
GROUPED = DISPATCH.replace("dispatch_gemm", "grouped_gemm").replace("world = 2\n", "ep_world = 2\n")


@pytest.mark.parametrize("text", [DISPATCH, GROUPED], ids=["dispatch_gemm", "grouped_gemm"])
def test_a_study_becomes_a_verified_winner_and_is_not_measured_again(tmp_path: Path, text: str):
    path = tmp_path / "tiny.toml"
    path.write_text(text)
    study = load_study(path)
    url, cache = f"sqlite:///{tmp_path / 'tktune.db'}", ArtifactCache(tmp_path / "cache")
    events: list[Event] = []
    (result,) = tune(study, url, cache, listener=Tee(events.append))

    done = [event for event in events if isinstance(event, TrialDone)]
    ready = next(event for event in events if isinstance(event, SpaceReady))
    assert done[0].config == result.default and len(done) == min(8, ready.feasible) == result.measured
    assert {event.status for event in done} <= {status.OK, status.CENSORED}, [e.sentence for e in done]
    assert result.winner is not None and result.time_us is not None and result.default_us is not None
    chosen = next(event for event in events if isinstance(event, WinnerChosen))
    assert chosen.band is not None and result.time_us <= result.default_us * (1 + 2 * chosen.band)
    of_noise = ("disturbed", "too close to tell apart", "µs at first")  # what a shared machine may be told
    notes = [event.sentence for event in events if isinstance(event, Note)]
    assert not [sentence for sentence in notes if not any(words in sentence for words in of_noise)]

    found = result.attribution
    assert found is not None and found.fused_us and found.comp_us and found.peer_us
    assert (found.comm_us is not None and found.serial_us is not None) == (study.family == "dispatch_gemm")
    with Store.open(url, "ro") as store:
        assert store.check() == []
        winner = store.winner(result.problem, result.device)
        roles = [row.role for row in store.verifications(store.keys()[0])]
    assert winner is not None and winner.config == result.winner and "default" in roles

    events.clear()
    (again,) = tune(study, url, ArtifactCache(tmp_path / "cache"), listener=Tee(events.append))
    assert (again.winner, again.measured, again.builds) == (result.winner, 0, 0)
    assert not [event for event in events if isinstance(event, TrialDone | BuildStarted)]
    assert [event for event in events if isinstance(event, Resumed)]

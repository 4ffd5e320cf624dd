"""The forms that GPU tests run through: feasible, few, and every two words of the space together where they can be."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

from dispatch_forms import form_name, forms

from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family

FIELDS = {"hidden": 512, "cols": 768, "experts": 16, "top_k": 4, "tokens": 200, "world": 2}


def test_any_two_words_occur_together_in_a_feasible_form():
    space = family("dispatch_gemm").space(
        Problem("dispatch_gemm", **FIELDS, weight_layout="enk"), device_class("sm_90a")
    )
    names = [p.name for p in space.parameters if isinstance(p.values[0], str)] + ["CLUSTER"]
    found = forms(space)

    def pairs(configs):
        return {
            (one, config[one], other, config[other])
            for config in configs
            for one, other in itertools.combinations(names, 2)
        }

    assert pairs(found) == pairs(space.feasible)
    assert all(space.is_feasible(form) for form in found)
    assert found[0] == space.default_config()
    assert len(found) == len({form_name(space, form) for form in found})
    assert len(found) <= 2 * max(len(p.values) for p in space.parameters if p.name in names) + 4

"""Goal: whatever has a bound in the core is met in the simulator, or it is said why not.

Method: the constants of the core's modules are compared with the table of `sim/bounds.py`. That each was met is what
the probes are for (test_sim.py).
"""

from __future__ import annotations

import importlib
import pkgutil
import re

import regrow.core
from regrow.core import flusher
from regrow.sim.bounds import BOUNDS, STATIC, UNSHRUNK, shrink
from regrow.sim.choices import Choices
from regrow.sim.probes import PROBES
from regrow.sim.profiles import PROFILES, make_scenario

LOOKS_LIKE_A_BOUND = re.compile(r"[A-Z_]+_(MAX|BYTES|ROWS|AHEAD|LIMIT)$")


def find_bounds() -> set[str]:
    found = set()
    for info in pkgutil.iter_modules(regrow.core.__path__):
        if info.name in STATIC:
            continue
        module = importlib.import_module(f"regrow.core.{info.name}")
        with open(str(module.__file__), encoding="utf-8") as lines:
            source = lines.read()
        found |= {
            f"{info.name}.{name}"
            for name in vars(module)
            if LOOKS_LIKE_A_BOUND.match(name) and re.search(rf"^{name} = ", source, re.MULTILINE)
        }
    return found


def test_every_bound_is_listed() -> None:
    listed = {bound.key for bound in BOUNDS} | set(UNSHRUNK)
    assert find_bounds() - listed == set(), "make it small in BOUNDS, or say in UNSHRUNK why not"
    assert listed - find_bounds() == set(), "they are gone"


def test_every_bound_has_a_probe_and_smaller_values() -> None:
    for bound in BOUNDS:
        assert bound.probe in PROBES, bound.key
        usual = getattr(bound.module, bound.name)
        assert all(0 < value < usual for value in bound.values), bound.key
        assert all(getattr(module, bound.name) == usual for module in bound.also), bound.key


def test_bounds_are_as_they_were_afterwards() -> None:
    usual = {bound.key: getattr(bound.module, bound.name) for bound in BOUNDS}
    with shrink({bound.key: bound.values[0] for bound in BOUNDS}):
        assert flusher.FLUSHES_UNACKED_MAX == 1
        assert all(getattr(m, b.name) == b.values[0] for b in BOUNDS for m in (b.module, *b.also))
    assert usual == {bound.key: getattr(bound.module, bound.name) for bound in BOUNDS}


def test_a_tape_of_zeros_has_the_bounds_of_users() -> None:
    for profile in PROFILES.values():
        drawn = make_scenario(profile, Choices([])).bounds
        assert not drawn.keys() & {bound.key for bound in BOUNDS}
        seeds = [make_scenario(profile, Choices(seed=seed)).bounds for seed in range(40)]
        if profile.bounds:
            assert {key for bounds in seeds for key in bounds} >= {bound.key for bound in BOUNDS}
        else:
            assert not any(seeds)

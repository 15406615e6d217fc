"""Planted bugs of publications, the second tenant of cuts: see planted.py."""

from __future__ import annotations

from typing import Any

from regrow.core.cut import TENANT, TENANTS, Unsave
from regrow.core.cuts import Numbers
from regrow.core.states import CutState
from regrow.sim.patches import drain


def clean_to_both(original: Any) -> Any:
    def on_end(self: Any, end: Any) -> Any:
        ends = end.durable and end.number == self.number and self.life.state is CutState.CAPTURED
        tenant = self._at.tenant if ends else TENANT
        effects = original(self, end)
        if ends and self._files is None:
            self._store.begin_capture(next(other for other in TENANTS if other != tenant), False)
            drain(self._store)
        return effects

    return on_end


def publication_forgotten(original: Any) -> Any:
    def give_up(self: Any) -> Any:
        if self.life.state is not CutState.CAPTURED or self._at.tenant == TENANT:
            return original(self)
        drain(self._store)
        self.life.move("over")
        return [*original(self), Unsave(number=self.number, tenant=self._at.tenant)]

    return give_up


def counted_apart(original: Any) -> Any:
    def init(self: Any, plans: Any, **values: Any) -> None:
        original(self, plans, **values)
        for maker in self.makers.values():
            maker._numbers = Numbers(maker._numbers.last)

    return init


def both_at_once(original: Any) -> Any:
    def tick(self: Any, now: float) -> Any:
        return [effect for maker in self._order for effect in maker.tick(now)]

    return tick

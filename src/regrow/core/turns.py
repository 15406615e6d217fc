"""Whose turn it is: checkpoints and publications want cuts of the same servers, which make one at a time.

Theory of operation. A store has one capture at a time, and a capture is over when what was captured is stored. So the
two take turns: an attempt of one begins when none of the other is under way. That is simple, and it makes a wait. Each
wait has a bound:

- A publication waits for the checkpoint under way, for as long as that takes to be stored. Look-ups get older rows
  meanwhile, nothing else happens.
- A checkpoint waits for the publication under way for `WAIT_SECONDS_MAX`, and then that is given up: what protects the
  run goes before what is only wanted early. Nothing is lost with it, as its rows count as changed again.
- If both are due, whoever had the last turn is second. So neither waits for ever, however short the other's interval.

When nobody trains any more, only what was asked for is cut: one whose time has come would wait for a step that nobody
makes, and the others for it. Where everybody stands is known when servers have told their marks for the first cut of
the end, and not before: steps that are heard of until then were made before, and a coordinator that has just begun
hears of all of them then.

The rule to keep: attempts of all are numbered by one counter. A server takes a higher number for a newer question, and
whoever counted for himself would be deaf to half of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from regrow.core.cut import TENANT
from regrow.core.cuts import TERM, CutNow, CutPlan, Cuts, Effect, ManifestWritten, Numbers
from regrow.core.identity import Identity
from regrow.core.messages import CutBegun, CutMarks, CutSaved

# How long a checkpoint that is due waits for a publication. Too small: on a storage that is slow for a while there are
# no publications. Too large: a run that falls back then goes back further.
WAIT_SECONDS_MAX = 30.0


class Turns:
    """All who make cuts at one coordinator, by tenant. One of them at a time."""

    def __init__(
        self, plans: Mapping[int, CutPlan], *, is_sync: bool, marks: int, term: int, salt: str, goes_back: bool = False
    ) -> None:
        """See `Cuts`."""
        numbers = Numbers(term * TERM)
        self.makers = {
            tenant: Cuts(
                plan,
                is_sync=is_sync,
                marks=marks,
                term=term,
                salt=salt,
                goes_back=goes_back,
                tenant=tenant,
                numbers=numbers,
            )
            for tenant, plan in plans.items()
        }
        self._order = list(self.makers.values())  # who is first if several could begin
        self._step = 0
        self._still_step: float | None = None  # nobody trains since this step; infinity: one that is not known yet

    @property
    def underway(self) -> Cuts | None:
        """Whose turn it is."""
        return next((maker for maker in self._order if maker.is_underway), None)

    def want(self, now: CutNow) -> list[Effect]:
        """Somebody asks for a cut. At the end of training, nobody may wait for steps that are not made."""
        maker = self.makers.get(now.tenant)
        if maker is None:
            return []
        self._still_step = math.inf if now.still else self._still_step
        others = [effect for other in self._order if now.still and other is not maker for effect in other.free_steps()]
        return [*others, *maker.want(now)]

    def on_step(self, step: int) -> None:
        self._step = max(step, self._step)
        for maker in self._order:
            maker.on_step(step)

    def know(self, peers: dict[int, Identity] | None) -> list[Effect]:
        """Who the servers are; None while one of them is not whole."""
        return [effect for maker in self._order for effect in maker.know(peers)]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        is_still = self._still_step is not None and self._step <= self._still_step
        for maker in list(self._order):
            underway = self.underway
            effects += maker.tick(now, may_begin=underway is None and (not is_still or maker.wants_still))
            if underway is None and maker.is_underway:  # next time the others are first
                self._order.remove(maker)
                self._order.append(maker)
        return [*effects, *self._check_waits(now)]

    def _check_waits(self, now: float) -> list[Effect]:
        checkpoints, underway = self.makers.get(TENANT), self.underway
        if checkpoints is None or underway is None or underway is checkpoints:
            return []
        since = checkpoints.waits_since
        if since is None or now - since <= WAIT_SECONDS_MAX:
            return []
        return underway.give_way(f"a checkpoint has waited for {WAIT_SECONDS_MAX:.0f} s")

    def on_message(self, server: int, message: CutMarks | CutBegun | CutSaved) -> list[Effect]:
        """Of a server, about the cut under way; what is about another is too late."""
        maker = self.underway
        if maker is None:
            return []
        if isinstance(message, CutMarks):
            effects = maker.on_marks(server, message)
            if self._still_step is not None and maker.stood_at is not None:
                self._still_step = maker.stood_at
            return effects
        if isinstance(message, CutBegun):
            return maker.on_begun(server, message)
        return maker.on_saved(server, message)

    def on_manifest_written(self, written: ManifestWritten) -> list[Effect]:
        maker = self.makers.get(written.tenant)
        return [] if maker is None else maker.on_manifest_written(written)

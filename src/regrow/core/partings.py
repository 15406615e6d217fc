"""Pairs of servers that cannot reach each other, although the coordinator hears both: which of the two is replaced.

A server says whom it has had no answer of (`answers.py`). Nobody can tell from that at which end the line is broken. So
the one that does not answer is replaced first; if its successor does not answer either, it is the other end. If that
does not help, nothing will: two machines are cut off from each other, and the run cannot go on with both.

The rules to keep: whoever is silent, starting or itself waits for a third one owes nobody an answer; a suspect stays
suspected until it was replaced, or two that complain of each other would be waited for in turn, for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from regrow.core.identity import Identity
from regrow.core.messages import Unanswered
from regrow.core.place import Place

# Too short: a machine that is busy for long, or a network that has to find another way, costs a replacement. Too long:
# pushes are not durable meanwhile, windows fill, and everybody waits.
UNANSWERED_SECONDS_MAX = 30.0
REPLACED_MAX = 2  # of one pair, in turn; then the run is given up
FORGET_SECONDS = 600.0  # after which a pair that had no complaint is a pair like any other


@dataclasses.dataclass(slots=True)
class Parting:
    """Two servers that do not reach each other."""

    suspect: Identity  # the end that is replaced next
    at: float  # when somebody last complained
    replaced: int = 0  # how often one of the two was


class Partings:
    """What servers say about each other, and what follows from it."""

    def __init__(self, *, seconds_max: float = UNANSWERED_SECONDS_MAX) -> None:
        self.hopeless = ""  # why replacing anybody does not help
        self._seconds_max = seconds_max
        self._pairs: dict[tuple[int, int], Parting] = {}

    def find_suspects(self, places: Sequence[Place], now: float, tolerates: Callable[[int], bool]) -> dict[int, str]:
        """Servers to be replaced, and why. `tolerates`: whether the loss of this one is survived now."""
        suspects: dict[int, str] = {}
        for accuser, place in enumerate(places):
            said = place.unanswered
            if said is None or not self._counts(place, said, places, now):
                continue
            parting = self._find_parting(accuser, said.server, places, now, tolerates)
            if parting.replaced >= REPLACED_MAX:
                self.hopeless = f"S{accuser} and S{said.server} cannot reach each other, nor can their successors"
            else:
                reason = f"S{accuser} has had no answer of S{said.server} for {said.seconds} s"
                again = " although that was replaced" if parting.replaced else ""
                suspects.setdefault(parting.suspect.id, reason + again)
        return suspects

    def _counts(self, place: Place, said: Unanswered, places: Sequence[Place], now: float) -> bool:
        """Whether this complaint is about a server that could have answered, and old enough."""
        if not 0 <= said.server < len(places) or not place.means_silence or not place.is_steady(now):
            return False
        other = places[said.server]
        if other.member is None or other.member.incarnation != said.incarnation or not other.means_silence:
            return False
        if min(said.seconds, now - other.steady_since) < self._seconds_max:
            return False
        third = other.unanswered
        waits_itself = third is not None and places[third.server % len(places)] is not place
        return not (waits_itself and third is not None and third.seconds >= self._seconds_max / 2)

    def _find_parting(
        self, accuser: int, accused: int, places: Sequence[Place], now: float, tolerates: Callable[[int], bool]
    ) -> Parting:
        pair = min(accuser, accused), max(accuser, accused)
        parting = self._pairs.get(pair)
        if parting is None or now > parting.at + FORGET_SECONDS:
            suspect = accuser if tolerates(accuser) and not tolerates(accused) else accused
            parting = self._pairs[pair] = Parting(_name(places[suspect]), now)
        elif not places[parting.suspect.id].is_filled_by(parting.suspect):
            other = pair[0] + pair[1] - parting.suspect.id
            parting.suspect = _name(places[other])
            parting.replaced += 1
        parting.at = now
        return parting


def _name(place: Place) -> Identity:
    assert place.member is not None
    return place.member.identity

"""The patches behind the planted bugs (planted.py) that show only when somebody hangs, is cut off, hears things twice
or has a wrong clock (hangs.py), or when whole records are loaded (dumps.py). The rules of patches.py hold here too."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.core.effects import Delivered
from regrow.errors import ProtocolError

# --- Time ---


def clock_goes_back(original: Any) -> Any:
    def read(self: Any, now: float) -> float:
        return now

    return read


def slow_forgives_all(original: Any) -> Any:
    def on_tick(self: Any, now: float) -> Any:
        self._is_slow = False
        return original(self, now)

    return on_tick


def own_pause_is_silence(original: Any) -> Any:
    def on_tick(self: Any, now: float) -> Any:
        self._now = max(self._now, now - 0.01) if self._now else now
        return original(self, now)

    return on_tick


# --- Frames ---


def frames_twice(original: Any) -> Any:
    def accept(self: Any, stamp: Any, wire_bytes: int = 0) -> Any:
        again = 0 < stamp.number <= self.received and (stamp.source_incarnation, stamp.target_incarnation) == (
            self.peer.incarnation,
            self.local.incarnation,
        )
        return original(self, stamp, wire_bytes) or again

    return accept


def any_incarnation(original: Any) -> Any:
    def accept(self: Any, stamp: Any, wire_bytes: int = 0) -> Any:
        mine = msgspec.structs.replace(
            stamp, source_incarnation=self.peer.incarnation, target_incarnation=self.local.incarnation
        )
        try:
            return original(self, mine, wire_bytes)
        except ProtocolError:
            if stamp == mine:
                raise
            return False

    return accept


# --- Who may speak ---


def zombie_is_heard(original: Any) -> Any:
    def on_server_message(self: Any, event: Any) -> Any:
        known = self.server.peers.get(event.source.id) if self.server is not None else None
        if known is not None and event.source.incarnation < known.incarnation:
            event = Delivered(source=known, message=event.message)
        return original(self, event)

    return on_server_message


# --- Who does not reach whom (parted.py) ---


def death_overtakes(original: Any) -> Any:
    def is_answer_owed(self: Any, named: Any) -> bool:
        return False

    return is_answer_owed


def begins_anew_unasked(original: Any) -> Any:
    def is_answer_owed(self: Any, named: Any) -> bool:
        return original(self, named) and not self._job.verdict(self._find_down()).survivable

    return is_answer_owed


def streamed_is_not_enough(original: Any) -> Any:
    def can_answer(self: Any, sweep: Any) -> bool:
        return bool(self._have_agreed(sweep))

    return can_answer


def complaints_unheard(original: Any) -> Any:
    def find_suspects(self: Any) -> Any:
        return {}

    return find_suspects


# --- Cuts ---


def cut_waits_for_workers(original: Any) -> Any:
    def tick(self: Any, now: float, **turn: Any) -> Any:
        if self._attempt is not None:
            self._attempt.at_since = now
        return original(self, now, **turn)

    return tick


# --- Records ---


def writes_not_resent(original: Any) -> Any:
    def on_joined(self: Any, peer: Any) -> Any:
        kept, self._writes = self._writes, {}
        effects = original(self, peer)
        self._writes = kept
        return effects

    return on_joined


def written_before_flushed(original: Any) -> Any:
    def write_records(self: Any, source: Any, write: Any) -> Any:
        effects = original(self, source, write)
        if self._writes:
            _, answer = self._writes.pop()
            effects = [*effects, answer]
        return effects

    return write_records


# --- Processes that hang for good (forever.py) ---


def nobody_asks(original: Any) -> Any:
    def look(self: Any, now: float) -> Any:
        return original(self, now)[0], []

    return look


def hung_spares_are_good_enough(original: Any) -> Any:
    def promote(self: Any, spare: Any, who: Any) -> None:
        original(self, spare, who)
        self.end(who)  # whoever has a place is taken for well

    return promote


# --- Coordinators that come back elsewhere ---


def servers_keep_the_address(original: Any) -> Any:
    def on_listens(self: Any, who: Any, address: str) -> Any:
        return [order for order in original(self, who, address) if order.who.role != "server"]

    return on_listens


def newcomers_untold(original: Any) -> Any:
    def on_listens(self: Any, who: Any, address: str) -> Any:
        return [order for order in original(self, who, address) if not order.who.incarnation]

    return on_listens


# --- Nodes that vanish ---


def machine_is_one_loss(original: Any) -> Any:
    seen: dict[Any, float] = {}

    def judge(self: Any, event: Any) -> Any:
        if seen.get(self) == event.now:
            return []
        seen[self] = event.now
        return original(self, event)

    return judge


# --- Launchers that follow each other ---


def numbers_on_from_what_is_heard(original: Any) -> Any:
    return lambda self: range(1 << 30)

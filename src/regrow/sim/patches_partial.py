"""The patches behind the planted bugs (planted.py) of partial recovery. The rules of patches.py hold here too."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from regrow.core.recall import SAVES_TENANT
from regrow.core.recall_events import SavesFound


def ahead_of_copies(original: Any) -> Any:
    def begin(self: Any) -> Any:
        flusher = self._flusher
        flusher.flush_all, flusher.numbers = lambda: [], lambda: [0] * len(flusher.coded)
        try:
            return original(self)
        finally:
            del flusher.flush_all, flusher.numbers

    return begin


def counted_from_the_save(original: Any) -> Any:
    def join(self: Any) -> Any:
        updates = self._flusher.updates
        effects = original(self)
        lost = sum(self._flusher.applied[self._mine[0]]) - sum(self._found.marks)
        self._flusher.updates_lost = min(updates, max(0, lost))
        values = {**effects[1].values, "updates_lost": self._flusher.updates_lost}
        return [effects[0], type(effects[1])(name=effects[1].name, values=values)]

    return join


def clean_before_durable(original: Any) -> Any:
    def on_saved(self: Any, saved: Any) -> Any:
        if saved.error and not self._full_wanted and not self._store.capture_left():
            saved = dataclasses.replace(saved, error="")
        return original(self, saved)

    return on_saved


def skipped_of_now(original: Any) -> Any:
    """What a save leaves out is counted when it is known which rows it has, and not as of its instant."""

    def check_copies(self: Any) -> Any:
        effects = original(self)
        now = self._store.updates_uncaptured(SAVES_TENANT) if effects else 0
        return [
            dataclasses.replace(save, updates=save.updates + save.skipped - now, skipped=now) if now else save
            for save in effects
        ]

    return check_copies


def older_save_first(original: Any) -> Any:
    """What is waited for is taken for never saved, and computed: a row is served before its save was read."""

    def receive(self: Any, source: Any, brought: Any) -> Any:
        if isinstance(brought, SavesFound):
            brought = dataclasses.replace(brought, ids={table: ids[:-1] for table, ids in brought.ids.items()})
        return original(self, source, brought)

    return receive


def joins_at_the_save(original: Any) -> Any:
    def join(self: Any) -> Any:
        effects = original(self)
        for group in self._mine:
            self._flusher.applied[group] = list(self._found.marks)
        return effects

    return join


def delta_after_a_loss(original: Any) -> Any:
    def know(self: Any, peers: Any) -> Any:
        wanted = self._full_wanted
        effects = original(self, peers)
        self._full_wanted = wanted
        return effects

    return know


def save_ends_twice(original: Any) -> Any:
    def on_saved(self: Any, saved: Any) -> Any:
        original(self, saved)
        self.life.move("over")

    return on_saved


# --- Parities first, saves beyond ---


def parities_not_void(original: Any) -> Any:
    def make_void(self: Any, recalled: Any) -> Any:
        store, self._store = self._store, _Nothing()
        try:
            return original(self, recalled)
        finally:
            self._store = store

    return make_void


class _Nothing:
    """A store in which nothing is made void."""

    def parity_void(self, table: int, q: int) -> None:
        return


def old_flushes_count(original: Any) -> Any:
    """What a source sent before it heard that the parity is void is taken for a part of the new one."""

    def make_void(self: Any, recalled: Any) -> Any:
        sends = original(self, recalled)
        for state in self.held.values():
            state.asked = 0
        return sends

    return make_void


def back_before_mended(original: Any) -> Any:
    def find_unmended(self: Any, groups: Any) -> Any:
        return set()

    return find_unmended


def decodes_for_recalled(original: Any) -> Any:
    def know(self: Any, **said: Any) -> Any:
        return original(self, **{**said, "recalled": ()})

    return know


def recall_forgotten(original: Any) -> Any:
    """The successor of one that was recalled, and not back, is taken for one that parities bring back."""

    def take_place(self: Any, place: Any, member: Any, cause: str) -> Any:
        return original(self, place, msgspec.structs.replace(member, recalled=False), cause)

    return take_place


def counted_again(original: Any) -> Any:
    """A push that comes again for some groups counts for all."""

    def count_updates(self: Any, counts: Any, slots: Any, mark: int, seq: int) -> Any:
        return original(self, counts, slots, mark, 1 << 62)

    return count_updates


def saved_unlevel(original: Any) -> Any:
    def are_level(self: Any) -> bool:
        return True

    return are_level


def delta_after_parities(original: Any) -> Any:
    def init(self: Any, **parts: Any) -> Any:
        original(self, **parts)
        self._full_wanted &= not parts["ways"].all

    return init


def losses_forgotten(original: Any) -> Any:
    def activate(self: Any, have: Any, **said: Any) -> Any:
        return original(self, msgspec.structs.replace(have, updates_lost=0), **said)

    return activate

"""The patches behind the planted bugs (planted.py) of partial recovery. The rules of patches.py hold here too."""

from __future__ import annotations

import dataclasses
from typing import Any

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
        lost = sum(self._flusher.applied[self._bare]) - sum(self._found.marks)
        self.updates_lost = min(updates, max(0, lost))
        values = {**effects[1].values, "updates_lost": self.updates_lost}
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
        self._flusher.applied[self._bare] = list(self._found.marks)
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

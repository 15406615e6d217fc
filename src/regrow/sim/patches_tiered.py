"""The patches behind the planted bugs (planted.py) of rows on disk. The rules of patches.py hold here too."""

from __future__ import annotations

from typing import Any

from regrow.core.paging import EXPECT, Waiter


def keeps_ticket(original: Any) -> Any:
    def drop(self: Any, waiter: Any) -> None:
        store, self._store = self._store, _Unreleased
        try:
            original(self, waiter)
        finally:
            self._store = store

    return drop


def keeps_wish(original: Any) -> Any:
    """Of rows that were read ahead only: whoever was served gives his back."""

    def drop(self: Any, waiter: Any) -> None:
        (keeps_ticket(original) if waiter.kind == EXPECT else original)(self, waiter)

    return drop


class _Unreleased:
    @staticmethod
    def release(ticket: int) -> None:
        """Nothing is given back."""


def push_overtakes(original: Any) -> Any:
    """One whose rows are in memory is applied at once, whoever of its worker waits."""

    def push(self: Any, source: Any, push: Any) -> Any:
        waiter = Waiter("push", source.id, push.seq)
        is_waiting = bool(self._pushes.get(source.id)) and not self.cut.holds(source.id, push.seq)
        if is_waiting and self.paging.ask(waiter, push.counts, push.slots):
            return self._apply(source, push)
        self.paging.drop(waiter)
        return original(self, source, push)

    return push


def serves_evicted(original: Any) -> Any:
    """Pins end when the rows are here, not when they were used; then there is upkeep."""

    def poll(self: Any) -> Any:
        waiters = original(self)
        for waiter in waiters:
            for place in self._store._tickets[self._tickets[waiter]].places[:1]:
                self._store._resident.pop(place, None)
        return waiters

    return poll


def saved_before_complete(original: Any) -> Any:
    def check_complete(self: Any) -> Any:
        if self._epochs is None:
            return original(self)
        epochs = self._epochs
        epochs.poll_complete = lambda: self._epoch
        try:
            return original(self)
        finally:
            del epochs.poll_complete

    return check_complete


def commits_alone(original: Any) -> Any:
    """A server lets go of the older checkpoint when its own part of the newer one is complete."""

    def check_complete(self: Any) -> Any:
        effects = original(self)
        if effects and self._epochs is not None:
            self._epochs.commit_epoch(self._epoch)
            self._epochs.commit_epoch = lambda epoch: self._epochs.__dict__.pop("commit_epoch", None)
        return effects

    return check_complete

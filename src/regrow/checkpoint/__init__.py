"""Checkpoints: what is on storage, how it gets there and back, and how it stays small.

For plain torch models: `DeltaCheckpointer`. It is imported when it is asked for, because it needs torch; processes that
only store, merge or restore rows do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer, RestoredModel
    from regrow.checkpoint.torch.tracker import Tracker

__all__ = ["DeltaCheckpointer", "RestoredModel", "Tracker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regrow.checkpoint.torch import checkpointer, tracker

    return getattr(tracker if name == "Tracker" else checkpointer, name)

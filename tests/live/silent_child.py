"""A child of the launcher whose disk falls silent: server 1, once, when it has read some rows.

    python silent_child.py DIRECTORY POLLS

Everything is real but the end of a read: what the store has read after so many polls is not told any more, as of a disk
that takes commands and answers none. It is waited for a second instead of two minutes. The life after that, which finds
a note in the directory, has a disk that answers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from regrow.core import paging
from regrow.launch import child
from regrow.store.tiered import TieredStore

SECONDS_MAX = 1.0


def main() -> int:
    note, polls_left = Path(sys.argv[1]) / "silent", int(sys.argv[2])
    has_been = note.exists()
    paging.DISK_SECONDS_MAX = SECONDS_MAX
    bind = TieredStore._bind

    def bind_silent(self: TieredStore) -> None:
        bind(self)
        poll = self.poll_fetched
        if self._server != 1 or has_been:
            return

        def poll_fetched() -> list[int]:
            nonlocal polls_left
            polls_left -= 1
            if polls_left > 0:
                return poll()
            note.touch()
            return []

        self.poll_fetched = poll_fetched

    TieredStore._bind = bind_silent  # type: ignore[method-assign]
    return child.main()


if __name__ == "__main__":
    sys.exit(main())

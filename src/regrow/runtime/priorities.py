"""Whose rows have priorities when a server saves its own: the tables that were named, all, or the largest.

Servers decide it, since they know every table as soon as there is one; a launcher knows those of a script never. Only
tables that come back from saves count: of dense parameters there are copies.
"""

from __future__ import annotations

from collections.abc import Sequence

from regrow.core.job import JobSpec
from regrow.launch.saving import OwnSaving

LARGEST_SHARE = 0.99  # of all rows, in the tables that count as the largest


def choose_tables(job: JobSpec, saving: OwnSaving) -> list[int]:
    """The numbers of these tables."""
    if saving.choice == "named":
        return [index for index, table in enumerate(job.tables) if table.name in saving.tables]
    recalled = [index for index, table in enumerate(job.tables) if job.protection.recalls(table)]
    if saving.choice == "all":
        return recalled
    return [recalled[at] for at in find_largest([job.tables[index].rows for index in recalled])]


def find_largest(rows: Sequence[int]) -> list[int]:
    """The fewest tables that hold LARGEST_SHARE of all rows, by their numbers."""
    order = sorted(range(len(rows)), key=lambda index: (-rows[index], index))
    found: list[int] = []
    held = 0
    for index in order:
        if held >= LARGEST_SHARE * sum(rows):
            break
        found.append(index)
        held += rows[index]
    return sorted(found)

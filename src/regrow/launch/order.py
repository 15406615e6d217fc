"""What commands and reports are (`orders.py` has all of them), and those about what workers of a script do together."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", omit_defaults=True):
    """Launcher to process."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Process to launcher."""


# -- steps of all workers


class Awaits(Report, frozen=True, kw_only=True, tag="awaits"):
    """A worker has made this synchronous step, and has waited for a while for the others to make it."""

    step: int


# -- evaluations of all workers


class Judge(Command, frozen=True, kw_only=True, tag="judge"):
    """To a worker that is ready to judge with others: every `count`-th batch, from `index` on. What it counts goes into
    a file of that directory, if there are others. `number` comes back: an evaluation may have to be begun again."""

    number: int
    index: int
    count: int
    directory: str = ""


class MergeTallies(Command, frozen=True, kw_only=True, tag="merge tallies"):
    """To the first of those who judge: these workers have written what they counted."""

    number: int
    workers: tuple[int, ...]
    directory: str


class Conclude(Command, frozen=True, kw_only=True, tag="conclude"):
    """To everybody who came to this evaluation: what was found. None: not a number."""

    metrics: dict[str, float | None]


class ReadyToJudge(Report, frozen=True, kw_only=True, tag="ready to judge"):
    """A worker has come to an evaluation that all make together, and waits: the `call`-th in that step of that loop, or
    (None) behind it. `merges`: whether what several workers have counted can be made one."""

    loop: int
    step: int | None
    call: int
    merges: bool


class Passed(Report, frozen=True, kw_only=True, tag="passed"):
    """A worker has passed over the steps of a loop up to this one: those before it did them."""

    loop: int
    step: int


class Tallied(Report, frozen=True, kw_only=True, tag="tallied"):
    """What a worker has counted is in its file, or why not."""

    number: int
    problem: str = ""


class Concluded(Report, frozen=True, kw_only=True, tag="concluded"):
    """The first worker has merged what all have counted."""

    number: int
    metrics: dict[str, float | None]

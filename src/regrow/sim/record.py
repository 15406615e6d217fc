"""What was tried so far, over all long runs: schedules, events, rare paths and findings of each profile.

A record is a file that every long run adds to, so that "a million schedules without a finding" is a sum that can be
looked at, and no seed is counted twice. Here is what it says and how it is shown; who writes it is the command line.
"""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.sim.runner import Result

FORMAT = 1
SEED_FIRST = 1_000_000  # Smaller ones are for tests and for whoever tries a few by hand.
TEXT_LENGTH_MAX = 400  # of a finding; all of it is seen when its seed is run again


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that violated an invariant, and when."""

    seed: int
    invariant: str
    text: str
    date: str
    version: str


class Tally(msgspec.Struct, kw_only=True):
    """All schedules of one profile."""

    schedules: int = 0
    events: int = 0
    crashes: dict[str, int] = msgspec.field(default_factory=dict)
    probes: dict[str, int] = msgspec.field(default_factory=dict)
    findings: list[Finding] = msgspec.field(default_factory=list)


class Sitting(msgspec.Struct, kw_only=True):
    """One run of the command: when, with what, for how long."""

    date: str
    version: str
    jobs: int
    schedules: int = 0
    events: int = 0
    findings: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0


class Record(msgspec.Struct, kw_only=True):
    """Everything. Seeds below `seed_next` are used up."""

    format: int = FORMAT
    seed_next: int = SEED_FIRST
    profiles: dict[str, Tally] = msgspec.field(default_factory=dict)
    sittings: list[Sitting] = msgspec.field(default_factory=list)

    def add(self, seed: int, result: Result) -> None:
        """One schedule more, of the last sitting."""
        sitting = self.sittings[-1]
        tally = self.profiles.setdefault(result.profile, Tally())
        for counted in (tally, sitting):
            counted.schedules += 1
            counted.events += result.events
        _count(tally.crashes, result.crashes)
        _count(tally.probes, result.probes)
        self.seed_next = max(self.seed_next, seed + 1)
        if result.invariant:
            text = result.text[:TEXT_LENGTH_MAX]
            found = Finding(
                seed=seed, invariant=result.invariant, text=text, date=sitting.date, version=sitting.version
            )
            tally.findings.append(found)
            sitting.findings += 1

    @property
    def schedules(self) -> int:
        return sum(tally.schedules for tally in self.profiles.values())


def _count(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        if count:
            total[name] = total.get(name, 0) + count


def read_record(data: bytes) -> Record:
    """ValueError says why this is no record."""
    try:
        record = msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is no record of the simulator: {error}") from None
    if record.format != FORMAT:
        raise ValueError(f"has format {record.format}, this version reads {FORMAT}")
    return record


def write_record(record: Record) -> bytes:
    """Always the same bytes for the same record, a value a line."""
    return msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"


def make_table(record: Record) -> str:
    """The record as people read it: a line a profile, and their sum. It follows from the record alone."""
    lines = [
        "| profile | schedules | events | deaths | recoveries | rare paths reached | findings |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    tallies = dict(sorted(record.profiles.items()))
    lines += [_make_line(f"`{name}`", tally) for name, tally in tallies.items()]
    total = Tally()
    for tally in tallies.values():
        total.schedules += tally.schedules
        total.events += tally.events
        total.findings += tally.findings
        _count(total.crashes, tally.crashes)
        _count(total.probes, tally.probes)
    lines.append(_make_line("all", total))
    return "\n".join([*lines, "", _make_note(record), *_list_findings(tallies)]) + "\n"


def _make_line(name: str, tally: Tally) -> str:
    reached = sum(count > 0 for count in tally.probes.values())
    deaths, recoveries = sum(tally.crashes.values()), tally.probes.get("recovered", 0)
    counts = f"{tally.schedules:,} | {tally.events:,} | {deaths:,} | {recoveries:,}"
    return f"| {name} | {counts} | {reached} | {len(tally.findings)} |"


def _make_note(record: Record) -> str:
    if not record.sittings:
        return "Nothing was run yet."
    first, last = record.sittings[0].date, record.sittings[-1].date
    when = f"On {first}" if first == last else f"From {first} to {last}"
    hours = sum(sitting.processor_seconds for sitting in record.sittings) / 3600
    return f"{when}, {hours:.1f} hours of processor time, seeds {SEED_FIRST} to {record.seed_next - 1}."


def _list_findings(tallies: dict[str, Tally]) -> list[str]:
    lines: list[Any] = []
    for name, tally in tallies.items():
        for found in tally.findings:
            command = f"regrow sim --profile {name} --seeds 1 --seed-first {found.seed}"
            lines.append(f"- {found.date}, version {found.version}: {found.invariant}, `{command}`")
    return ["", *lines] if lines else []

"""Counters of rare paths: a simulator that never gets somewhere proves nothing about it.

`PROBES` names every path that the fixed seeds of the tests must reach, and says why it is interesting.
"""

from __future__ import annotations

from collections import Counter

from regrow.core.job import JobSpec
from regrow.core.twins import OPTIMIZERS

PROBES = {
    "crash server": "a server dies",
    "crash worker": "a worker dies",
    "crash coordinator": "the coordinator dies",
    "crash replacement": "a server dies before it has recovered",
    "crash between effects": "a node dies with half of its messages sent",
    "two servers down": "two servers are not recovered at the same time",
    "server and coordinator down": "a server dies while there is no coordinator",
    "server and worker down": "a server dies while a worker is away or not quite back",
    "zombie sends": "a replaced server still runs and sends",
    "zombie stops": "a replaced server learns of it and ends",
    "worker zombie": "an old incarnation of a worker still pushes after its successor opened",
    "silence": "a server is declared dead only because it is silent",
    "pause survived": "a server was silent for a while, but not for too long",
    "reset": "a connection between two living nodes breaks and resumes",
    "frames resent": "frames that were lost with a connection are sent again",
    "late view": "a server gets messages of somebody who knows a newer view, and keeps them until it comes",
    "old frame": "a message of a replaced incarnation reaches a node that knows better",
    "flush": "parity is updated",
    "flush without rows": "a flush carries watermarks only",
    "row restored": "a decoded row comes back",
    "fault": "a row is asked for on demand",
    "begun again": "what is being decoded when another server has recovered is begun again at once",
    "rows expected": "a worker tells a replacement which rows it will need",
    "snap while pending": "a member answers with a published value that is not its current one",
    "flush during decode": "a flush arrives at a holder that is decoding",
    "stream": "rows stream to a new holder",
    "stream delta": "rows change after they were streamed",
    "push resent": "a worker sends undurable pushes to a replacement",
    "push seen before": "a server skips a push that it has",
    "push waits for rows": "a push arrives before its rows are back",
    "pull waits for rows": "a pull arrives before its rows are back",
    "window full": "a worker waits because too much is not durable yet",
    "tail": "a holder gives another a flush that it lacks",
    "syndrome": "two unknowns in a stripe are solved",
    "undo": "a pull of a step that is already applied is answered with the rows before it",
    "staged flush": "a flush waits for its commit",
    "data loss": "the coordinator says that rows are gone",
    "recovered": "a replacement has everything back",
    "cut published": "a checkpoint was made",
    "full cut": "a checkpoint that stands alone",
    "delta cut": "a checkpoint of what changed since another",
    "cut given up: a server died": "a server died while a cut was under way",
    "cut late": "a server was already further than the step to cut at (sync)",
    "push held": "a push waits for a cut",
    "copy on write": "a captured row changed before it was stored",
    "storage fails": "captured rows could not be stored",
    "delta after a failed cut": "what a failed cut had captured is captured again",
    "full because it was wanted": "the storage asked for a checkpoint that stands alone",
    "full publication": "a publication that stands alone was made, beside checkpoints",
    "delta publication": "and one of what changed since",
    "delta after a failed publication": "what a failed publication had captured is captured again",
    "publication waits for a save": "a server stores a save of its own, which goes before a publication",
    "coordinator dies in a cut": "a cut is under way when the coordinator dies",
    "resumed": "a run begins with a checkpoint of another",
    "resumed on other servers": "and on another number of servers",
    # Bounds that were met (bounds.py)
    "bound: flushes unanswered": "a flush waits because a holder has not answered those before it",
    "bound: streams under way": "the next rows of a stream wait until those before are in place",
    "bound: sweeps under way": "the next batch of a sweep waits until those before are in place",
    "bound: rows filled": "blank rows are left for the next tick",
    "bound: rows expected": "a worker expects more rows than it says",
    "bound: clocks kept": "a worker forgets the clock of a pull whose push is still to come",
    "bound: frames unacknowledged": "so much came one way that it is acknowledged by a frame of its own",
    "bound: tail": "a holder keeps as many flushes for others as it may",
    "bound: cut under way": "a cut is given up because some server waits for a push for too long",
    "bound: cut held": "a server has held pushes back for a cut for too long, and goes on without it",
    "bound: cut steps ahead": "a synchronous cut that comes too late is named as far ahead as it may be",
    "bound: rows aside": "so many captured rows changed before they were stored that the cut is given up",
    "bound: pieces given up": "a piece that was given up is not remembered any more",
    # Subjects together (profiles.CROSSED)
    "back: two phases, two parities": "a server came back under two-phase commit with r = 2",
    "back: two phases, mixed k": "the same with tables of different k",
    "back: sync, mixed k": "a server came back in synchronous mode with tables of different k",
    "back: three parities": "a server came back with r = 3",
    "back: commit none": "a server came back where losses are tolerated",
    **{f"back: {kind}": f"a server came back with rows of {kind}, to the bit" for kind in OPTIMIZERS},
    "three servers down": "three servers are not recovered at the same time",
    "coordinator dies with two servers down": "and its successor must find out who is whole",
}

# Partial recovery (own_saves.py)
PROBES |= {
    "own save": "a server saved its own rows",
    "own save fails": "... and the storage did not take them",
    "own save given up": "... and a cut came first",
    "own save leaves rows": "... and more had changed than it may have",
    "zombie saves": "a replaced server saves its rows",
    "saves found": "a replacement goes back to what its predecessor saved",
    "no save found": "... which had saved nothing",
    "saved row waited for": "a row of a save is needed before it is back",
    "updates lost": "updates are lost with a server",
    "recalled": "a server goes back to its saves although its rows have parities",
    "parity void": "a holder that lives makes a parity void, and asks for it",
    "parity void again": "... before it was whole again",
    "void frames dropped": "what was sent for the old parity arrives there",
    "decoded after a recall": "parities bring back rows that went back to a save before",
}

# Faults of which nobody dies (hangs.py): each happened, and lasted long enough to matter.
PROBES |= {
    "machine vanishes": "a server and whoever else is on its machine are gone at one instant",
    "machine of two servers": "... with another server",
    "machine of the coordinator": "... with the coordinator",
    "machine of a spare": "... with a spare",
    "launcher dies": "nobody decides for a while; then another launcher asks what there is",
    "launcher dies with a server": "... and a server was lost with the one before it",
    "missed by another launcher": "... and does not find somebody, who has a successor then",
    "coordinator elsewhere": "somebody is told that there is another coordinator, and where",
    "coordinator out of reach": "the launcher loses sight of a coordinator that goes on",
    "left for another coordinator": "... and somebody who hears it leaves it for its successor",
    "spare": "a spare was started",
    "spare promoted": "... and took a place",
    "spare dies": "a spare dies before it has a place",
    "spare hangs": "a spare hangs before it has a place",
    "hung spare promoted": "... and was given one, because nobody knew yet",
    "server hangs for good": "a server is stopped and nobody lets it go on",
    "worker hangs for good": "a worker is",
    "coordinator hangs for good": "the coordinator is",
    "hung server killed": "the launcher ends a server that hangs",
    "hung worker killed": "... a worker",
    "hung coordinator killed": "... the coordinator",
    "condemned": "a server was waited for as long as the user says, and rows are lost with it",
}
PROBES |= {
    "coordinator hangs": "the coordinator was stopped for seconds, and went on in office",
    "coordinator zombie": "the coordinator went on after its successor had started",
    "coordinator slow": "all ticks of the coordinator come late",
    "zombie gives orders": "a coordinator that is not in office declares somebody dead",
    "worker hangs": "a worker was stopped and went on",
    "worker hangs too long": "a worker went on after it had been replaced",
    "zombie goes on": "a server is replaced while it works with everybody else",
    "cut one way": "frames were stuck in one direction",
    "cut both ways": "frames were stuck in both",
    "cut off": "a server and the coordinator could not hear each other, while others heard both",
    "frame twice": "a frame arrives twice on one connection",
    "echo": "frames that arrived before arrive again",
    "echo of the past": "and they are of an incarnation that is over",
    "late frame": "a frame of a broken connection arrives after the next one was made",
    "starved server": "a server got no ticks for a while",
    "starved coordinator": "the coordinator got none",
    "death overtakes recovery": "a server dies when the word of another that it is whole is on its way",
    "parted": "two servers do not reach each other, for good, and one is replaced for it",
    "parted still": "... and its successor is not reached either",
    "replacement asked": "somebody would count as lost, and is asked how it is before that",
    "clock jumps back": "a machine's clock was set back",
    "clock jumps ahead": "and ahead",
    "rumour": "a server is said to have ended, and lives",
    "records written": "whole records are loaded",
    "records written again": "and at a replacement, because nobody had answered for them",
    "records read": "whole records are read",
    "row on disk": "rows are asked for that are not in memory",
    "cache full": "rows wait for room in memory",
    "everybody falls": "a death ends all processes",
    "begun again from epochs": "and all go on with what is in the files of their stores",
    "fallen again": "for the second time",
    "record waits for rows": "a read or write of whole records arrives before the rows are back",
}


def name_crossings(job: JobSpec) -> list[str]:
    """The probes of a server that came back in this job."""
    flush, ks = job.protection.flush, {table.k for table in job.tables}
    two_phases, mixed, most = flush.commit == "2pc", len(ks) > 1, max(table.r for table in job.tables)
    sync = job.mode == "sync"
    found = [
        ("back: two phases, two parities", two_phases and most == 2),
        ("back: two phases, mixed k", two_phases and mixed),
        ("back: sync, mixed k", sync and mixed),
        ("back: three parities", most == 3),
        ("back: commit none", flush.commit == "none"),
    ]
    kinds = {table.optimizer.kind for table in job.tables}
    return [name for name, so in found if so] + [f"back: {kind}" for kind in OPTIMIZERS if kind in kinds]


class Probes:
    """How often each was reached."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        assert name in PROBES, name
        self.counts[name] += 1

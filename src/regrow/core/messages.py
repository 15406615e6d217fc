"""Every message of the protocol. What a message is, and how one becomes bytes, is in `message.py`."""

from __future__ import annotations

import msgspec

from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.message import KINDS as KINDS
from regrow.core.message import U32 as U32
from regrow.core.message import U62 as U62
from regrow.core.message import Float32Array as Float32Array
from regrow.core.message import Int32Array as Int32Array
from regrow.core.message import Message as Message
from regrow.core.message import Secret as Secret
from regrow.core.message import SecretOrNone as SecretOrNone
from regrow.core.message import Text as Text
from regrow.core.message import UInt8Array as UInt8Array
from regrow.core.message import UInt32Array as UInt32Array
from regrow.core.message import UInt64Array as UInt64Array
from regrow.core.message import encode_meta as encode_meta
from regrow.core.message import message as message
from regrow.errors import Refusal

PROTOCOL_VERSION = 6

# --- Opening a connection -----------------------------------------------------------------------------------


@message(1)
class Challenge(Message, frozen=True, kw_only=True):
    """Acceptor -> initiator, first on every connection: prove that you hold the token."""

    protocol: U32
    nonce: Secret


@message(2)
class Hello(Message, frozen=True, kw_only=True):
    """Initiator -> acceptor: who I am, whom I mean, and the proof of all that. Carries a challenge of its own."""

    protocol: U32
    role: Text
    id: U32
    incarnation: U32
    nonce: Secret
    proof: Secret
    received: U62 = 0  # frames of this peer that have arrived: it sends again from the next one
    target_role: Text = ""
    target_id: U32 = 0
    target_incarnation: U32 = 0  # the numbers above are about this one; a coordinator may have been restarted since
    sealed: bool = False  # every frame after the handshake shall be authenticated


@message(3)
class Welcome(Message, frozen=True, kw_only=True):
    """Acceptor -> initiator: who I am, and my proof. From here on the link is numbered, and sealed if one of us
    wants it."""

    role: Text
    id: U32
    incarnation: U32
    proof: Secret
    received: U62 = 0
    sealed: bool = False


@message(4)
class Refused(Message, frozen=True, kw_only=True):
    """Either way, last before closing: why this connection cannot go on, and whether another one may. Instead of a
    Welcome it needs a proof: whoever cannot give one cannot make anybody stop dialing."""

    reason: Text
    kind: Refusal = Refusal.RETRY
    proof: SecretOrNone = b""


@message(5)
class Ack(Message, frozen=True, kw_only=True):
    """Either way, unnumbered, when much has arrived and nothing went back: the frame's header says it all."""


# --- Views --------------------------------------------------------------------------------------------------


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A server as a view names it."""

    id: int
    incarnation: int
    address: str
    recovering: bool = False  # its rows and parities are coming back: it does not count towards tolerance
    recalled: bool = False  # ... and more are lost than parities bring back: its rows come from its own saves

    @property
    def identity(self) -> Identity:
        return Identity(role="server", id=self.id, incarnation=self.incarnation)


class KnownView(msgspec.Struct, frozen=True, kw_only=True):
    """A view as a server remembers it, for a coordinator that does not."""

    epoch: int
    servers: tuple[Member, ...]
    job: JobSpec


@message(10)
class Register(Message, frozen=True, kw_only=True):
    """Server -> coordinator: where I listen, and the newest view I know (a new coordinator learns it so)."""

    address: Text
    known: KnownView | None = None


@message(11)
class Declare(Message, frozen=True, kw_only=True):
    """Worker -> coordinator: the job I am here for. The first one counts; a different one is refused."""

    job: JobSpec


@message(12)
class View(Message, frozen=True, kw_only=True):
    """Coordinator -> all: who serves, and what. Epochs order views and nothing else.
    `lost` is empty, or says which rows are gone for good: then nobody goes on."""

    epoch: U62
    servers: tuple[Member, ...]
    job: JobSpec
    lost: Text = ""


@message(13)
class Ready(Message, frozen=True, kw_only=True):
    """Server -> coordinator: the tables of this job are in memory."""

    rows: U62
    memory_bytes: U62


@message(14)
class Recovered(Message, frozen=True, kw_only=True):
    """Server -> coordinator: every row and every parity of mine is back."""


class Unanswered(msgspec.Struct, frozen=True, kw_only=True):
    """A server that owes another one an answer, and for how long it has given none."""

    server: int
    incarnation: int
    seconds: int


@message(15)
class Beat(Message, frozen=True, kw_only=True):
    """Server -> coordinator, often: I am alive, and have come to this step; and, on my way back, so much was brought to
    me so far. A stopped process sends none. `answers`: the question that this answers, if it is sent for one.
    `unanswered`: the server that I have waited for longest, if that is long."""

    step: U62 = 0
    brought: U62 = 0
    answers: U62 = 0
    unanswered: Unanswered | None = None


@message(16)
class StateAsk(Message, frozen=True, kw_only=True):
    """Coordinator -> server: how are you? The answer is a `Beat`, behind all that was said before."""

    number: U62


# --- Pull and push ------------------------------------------------------------------------------------------
# counts[t] slots of table t follow each other in `slots`; rows and gradients follow in the same order.


@message(20)
class Open(Message, frozen=True, kw_only=True):
    """Worker -> server, first: a session of this worker begins (again)."""


@message(21)
class Opened(Message, frozen=True, kw_only=True):
    """Server -> worker: how far this worker's pushes are durable, and which step is committed (sync mode).
    `reads_ahead`: rows are on disk, and come earlier if they are named before they are pulled (`Expect`)."""

    durable: U62
    committed: U62
    reads_ahead: bool = False


@message(22)
class Pull(Message, frozen=True, kw_only=True):
    """Worker -> server: the weights of these slots. Step 0 reads at once and takes part in nothing;
    in sync mode the pull for step t + 1 is also the commit of step t."""

    request: U62
    step: U62
    counts: Int32Array
    slots: UInt32Array


@message(23)
class Rows(Message, frozen=True, kw_only=True):
    """Server -> worker: the weights asked for, received straight into the plan's buffer."""

    request: U62
    durable: U62
    clock: U62  # pushes this server had applied when it read the rows
    rows: Float32Array


@message(24)
class Push(Message, frozen=True, kw_only=True):
    """Worker -> server: summed gradients of distinct slots. In sync mode seq is the step. `rates`: the learning rate of
    each table for just this push, whenever and wherever it is applied; none: those that the job was declared with."""

    seq: U62
    rates: tuple[float, ...] = ()
    counts: Int32Array
    slots: UInt32Array
    grads: Float32Array


@message(25)
class Pushed(Message, frozen=True, kw_only=True):
    """Server -> worker: push `seq` has arrived (async: applied; sync: staged)."""

    seq: U62
    durable: U62
    clock: U62


@message(26)
class Assign(Message, frozen=True, kw_only=True):
    """Worker -> server: initial weights for rows that nobody has touched; a touched row keeps its own.
    Every worker sends the same values before its first push, so no barrier is needed."""

    counts: Int32Array
    slots: UInt32Array
    weights: Float32Array


@message(27)
class Durable(Message, frozen=True, kw_only=True):
    """Server -> worker: this worker's pushes up to `durable` survive the loss of any r servers."""

    durable: U62


@message(28)
class Commit(Message, frozen=True, kw_only=True):
    """Worker -> server: push `seq` is staged everywhere (two-phase commit)."""

    seq: U62


@message(29)
class Expect(Message, frozen=True, kw_only=True):
    """Worker -> replacement: rows of batches to come. Those that are not back are asked for; nobody waits."""

    counts: Int32Array
    slots: UInt32Array


@message(30)
class ReadRecords(Message, frozen=True, kw_only=True):
    """Worker -> server: whole records (weights and state) of a range of slots, for digests and exports.
    With `parity` the range is of parity slots, and the records are parities."""

    request: U62
    table: U32
    parity: bool = False
    slot_first: U62
    slot_count: U32


@message(31)
class Records(Message, frozen=True, kw_only=True):
    """Server -> worker: the records asked for."""

    request: U62
    records: Float32Array


@message(32)
class WriteRecords(Message, frozen=True, kw_only=True):
    """Worker -> server: replace the whole records of these slots, when a saved state is loaded."""

    request: U62
    table: U32
    slots: UInt32Array
    records: Float32Array


@message(33)
class RecordsWritten(Message, frozen=True, kw_only=True):
    """Server -> worker: the records are in place."""

    request: U62


# --- Parity -------------------------------------------------------------------------------------------------
# `group` numbers the groups of core/groups.py; `marks` are the watermarks: the last push applied of each worker
# (async) or of all (sync, one number). Records are raw bits, relative to initial values (core/coding.py).


@message(40)
class Flush(Message, frozen=True, kw_only=True):
    """Source -> holder: what changed in the rows of a group since flush `number` - 1. Applied whole.
    With `staged` it is only kept until the source commits it (two-phase commit)."""

    group: U32
    number: U62
    stable: U62  # flushes up to here are acknowledged by all holders
    marks: tuple[int, ...]
    staged: bool = False
    updates: U62 = 0  # of rows that may be recalled, that pushes up to these marks made at the source
    updates_lost: U62 = 0  # of those, by partial recovery, so far
    counts: Int32Array
    slots: UInt32Array
    deltas: Float32Array


@message(41)
class FlushAck(Message, frozen=True, kw_only=True):
    """Holder -> source: every flush of the group up to `number` is in my parity (or staged)."""

    group: U32
    number: U62
    staged: bool = False


@message(42)
class FlushCommit(Message, frozen=True, kw_only=True):
    """Source -> holder: the staged flushes of the group up to `number` count now (two-phase commit)."""

    group: U32
    number: U62


@message(43)
class Stream(Message, frozen=True, kw_only=True):
    """Source -> new holder: rows it did not have yet, or what changed in rows it has. Acknowledged for pace."""

    group: U32
    counts: Int32Array
    slots: UInt32Array
    deltas: Float32Array


@message(44)
class StreamAck(Message, frozen=True, kw_only=True):
    """New holder -> source: one Stream has arrived."""

    group: U32


@message(45)
class StreamEnd(Message, frozen=True, kw_only=True):
    """Source -> new holder: that was all; the parity is now that of flush `number`. The sections are the last
    step's changes, for a holder that must undo it (sync)."""

    group: U32
    number: U62
    marks: tuple[int, ...]
    updates: U62 = 0
    updates_lost: U62 = 0
    counts: Int32Array
    slots: UInt32Array
    deltas: Float32Array


@message(63)
class StreamAsk(Message, frozen=True, kw_only=True):
    """Holder -> source: my parity of this group is void; stream it to me from the beginning. Asks of a holder rise."""

    group: U32
    number: U62


@message(64)
class StreamBegin(Message, frozen=True, kw_only=True):
    """Source -> holder: from here on all is as you asked; what came of this group before is not."""

    group: U32
    number: U62


@message(65)
class Mended(Message, frozen=True, kw_only=True):
    """Holder -> recalled source: my parities with rows of yours still need so many streams; 0: they are whole."""

    left: U32


@message(46)
class Undo(Message, frozen=True, kw_only=True):
    """Holder -> replacement, before Have: what the last step changed in the rows of the group (sync)."""

    group: U32
    counts: Int32Array
    slots: UInt32Array
    deltas: Float32Array


@message(47)
class Have(Message, frozen=True, kw_only=True):
    """Holder -> replacement: the parity of your group is at flush `number`, and these rows were ever touched:
    bit b of a table's words is its block b, table after table."""

    group: U32
    number: U62
    marks: tuple[int, ...]
    updates: U62 = 0
    updates_lost: U62 = 0
    touched: UInt64Array


@message(48)
class Restored(Message, frozen=True, kw_only=True):
    """Decoder -> replacement: rows come back. In the background (`request` is not 0) it is acknowledged, for pace."""

    request: U62
    counts: Int32Array
    slots: UInt32Array
    relatives: Float32Array


@message(49)
class Fault(Message, frozen=True, kw_only=True):
    """Replacement -> decoder: somebody waits for these rows, bring them first."""

    counts: Int32Array
    slots: UInt32Array


@message(56)
class RestoredAck(Message, frozen=True, kw_only=True):
    """Replacement -> decoder: these rows are in place."""

    request: U62


@message(50)
class SnapAsk(Message, frozen=True, kw_only=True):
    """Decoder -> member: the published values of these rows, relative to their initial ones."""

    request: U62
    counts: Int32Array
    slots: UInt32Array


@message(51)
class Snap(Message, frozen=True, kw_only=True):
    """Member -> decoder: the answer, behind every flush that it contains."""

    request: U62
    relatives: Float32Array


@message(52)
class Tail(Message, frozen=True, kw_only=True):
    """Holder -> holder, when `source` was replaced by `incarnation`: a flush of its group you may lack (r >= 2)."""

    source: U32
    incarnation: U32
    group: U32
    number: U62
    stable: U62  # the newest flush that every holder has, as far as the sender was told
    marks: tuple[int, ...]
    updates: U62 = 0
    updates_lost: U62 = 0
    counts: Int32Array
    slots: UInt32Array
    deltas: Float32Array


@message(53)
class TailEnd(Message, frozen=True, kw_only=True):
    """Holder -> holder: that was all I have; I am at flush `number`."""

    source: U32
    incarnation: U32
    group: U32
    number: U62


@message(54)
class SyndromeAsk(Message, frozen=True, kw_only=True):
    """Decoder -> other holder: your parity of these stripes without their living members (r >= 2)."""

    request: U62
    k: U32  # members of these stripes
    q: U32  # which of their parities is yours
    unknown: tuple[int, ...]  # the members that nobody has,
    incarnations: tuple[int, ...]  # and which replacements wait for them
    counts: Int32Array
    blocks: UInt32Array


@message(55)
class Syndrome(Message, frozen=True, kw_only=True):
    """Holder -> decoder: the answer, and the flush of each unknown member it was made at."""

    request: U62
    numbers: tuple[int, ...]
    relatives: Float32Array


# --- Checkpoints --------------------------------------------------------------------------------------------


@message(57)
class CutAsk(Message, frozen=True, kw_only=True):
    """Coordinator -> server: a cut is to be made; what have you applied? (Asynchronous: and hold pushes back.)"""

    number: U62
    yields: bool = False  # not now if the server is storing a save of its own


@message(58)
class CutMarks(Message, frozen=True, kw_only=True):
    """Server -> coordinator: this; or, with an error, that it cannot take part now."""

    number: U62
    marks: tuple[int, ...]
    error: Text = ""


@message(59)
class CutAt(Message, frozen=True, kw_only=True):
    """Coordinator -> server: capture your rows when you have applied exactly this; they are part of this piece."""

    number: U62
    marks: tuple[int, ...]
    piece: Text
    full: bool
    pause: bool = False  # nothing more is applied until the cut is over (to compare with)
    tenant: int = 0  # for whom: `cut.TENANTS`


@message(60)
class CutBegun(Message, frozen=True, kw_only=True):
    """Server -> coordinator: my rows are captured; or it was too late for that."""

    number: U62
    late: bool = False


@message(61)
class CutSaved(Message, frozen=True, kw_only=True):
    """Server -> coordinator: they are stored in these chunks (JSON), or why they are not."""

    number: U62
    error: Text
    chunks: UInt8Array


@message(62)
class CutEnd(Message, frozen=True, kw_only=True):
    """Coordinator -> server: the cut is over. If it is durable, forget that these rows changed."""

    number: U62
    durable: bool


@message(70)
class Words(Message, frozen=True, kw_only=True):
    """Lead <-> place: a line of `launch/places.py`. Nobody else says or hears such."""

    text: UInt8Array

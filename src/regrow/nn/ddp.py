"""Dense parameters in the workers: `job.dense(model, sync="ddp", optimizer=...)`.

Theory of operation. Every worker has all dense parameters and an optimizer of torch for them. After backward, and
after the push of the rows, gradients go round (gloo, `gloo.py`): each worker adds up those of all in the order of
workers, and steps. So all have the same bits, at all times; every exchange compares a checksum of what they had. Only
then are the rows of the next step pulled, which is what commits this one at the servers.

A worker that dies takes nothing along: the others show (`runtime/board.py`) the states behind their last steps,
whatever they are doing, and its successor begins from the one that its first step needs. The launcher tells all of a
new circle; each leaves what it waits for, and finds by what the others show whether the step that was under way is made
again or taken from somebody who has made it (`circle.py`).

Servers hold the state only for those who have no worker to ask: checkpoints, digests, a run that begins from one.
Worker 0 writes it there behind every step that a checkpoint may be of, before it pulls the next rows; the servers are
at that step until it does.

What breaks without the rules:
- Pulling before the exchange: servers would commit a step whose outcome nobody may have.
- Asynchronously there is no step that all have made: rows are pushed again after a loss, from other parameters. So it
  is refused there.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from regrow.core.job import JobSpec
from regrow.errors import CheckpointError, ConnectionLost, DataLoss, RegrowError
from regrow.launch.orders import CircleIs
from regrow.nn import weights as whole
from regrow.nn.circle import STATES_KEPT, Adopt, Await, Join, Keep, Lost, Shown, choose_beginning, choose_for_step
from regrow.nn.declaring import Static
from regrow.nn.dense_state import F32, DenseState
from regrow.nn.gloo import GlooGroup
from regrow.runtime.board import LOOK, STATES, Board, ask, split_states
from regrow.runtime.client import Client

if TYPE_CHECKING:
    from regrow.nn.seat import Peers, Seat

log = logging.getLogger("regrow.worker")

# For the other workers, together. One that died or hangs is replaced long before. Too small: a worker that waits for a
# slow one gives up.
OTHERS_SECONDS_MAX = 3600.0
LOOK_SECONDS = 0.02  # between two looks at what others show
TELL_SECONDS = 2.0  # of waiting for other workers, before the launcher hears of it
# Of groups that fail one after the other. Too few: a machine that was busy ends the run. Too many: one that cannot
# make any is noticed late.
GROUPS_FAILED_MAX = 20
HEAD_FLOATS = 2  # of what goes round: the step and a checksum, in the place of two floats


class DenseInWorkers:
    """One worker's copy of the dense parameters, and its part in keeping all copies the same."""

    def __init__(self, state: DenseState) -> None:
        self.state = state
        self._grads: F32 = np.zeros(0, np.float32)  # of the step under way
        self._has_grad: F32 = np.zeros(0, np.float32)
        self._moves: F32 = np.zeros(0, np.float32)
        self._states: dict[int, F32] = {}
        self._step = -1  # the last whose outcome is here; -1: none yet
        self._entered = 0  # the last circle
        self._group: GlooGroup | None = None
        self._failed = 0  # groups, since one worked
        self._is_left = 0  # the last circle of which nothing more will come
        self._seat: Seat
        self._peers: Peers | None = None
        self._board: Board | None = None

    # --- The beginning ---

    def begin(self, seat: Seat, client: Client, spec: JobSpec, *, done: int, resumed: bool) -> None:
        """The servers are there, and it is known which steps were made."""
        self._seat, self._client, self._done = seat, client, done
        self._indices = [[each.name for each in spec.tables].index(table.spec.name) for table in self.state.tables]
        self.static: Static = [(self._indices[0], self.state.table)]
        self._peers = seat.peers
        own = self.state.take(0) if done == 0 else None
        if resumed and done:
            own = self._read_kept(spec)
            if (found := self.state.find_step(own)) != done:
                raise CheckpointError(f"the checkpoint has rows of step {done}, and dense parameters of step {found}")
        if self._peers is not None:
            self._board = Board(self._peers.token)
        if own is not None and (resumed or self._peers is None or (self._peers.is_first and seat.worker == 0)):
            self._keep({done: own})
        if self._board is not None and self._peers is not None:
            self._show()
            self._peers.open(self._board.address)

    def prepare(self) -> None:
        """Before the first look at the parameters: they are what all have."""
        if self._step >= 0:
            return
        done, peers = self._done, self._peers
        own = {0: self.state.take(0)} if done == 0 else None
        if peers is None:
            self._keep(own or self._find_kept(done, "this worker died, and no other has them"))
            return
        started = time.monotonic()
        with self._client.pulse.rest():
            while not self._find_beginning(peers, own, started):
                time.sleep(LOOK_SECONDS)

    def _find_beginning(self, peers: Peers, own: dict[int, F32] | None, started: float) -> bool:
        self._check(started)
        done, circle = self._done, self._await_circle(lambda: self._check(started))
        choice, why = choose_beginning(
            done,
            worker=self._seat.worker,
            is_first=peers.is_first,
            has_own=own is not None,
            others=self._look(circle),
        )
        match choice:
            case Adopt(worker=worker):
                return self._keep(self._fetch(circle, worker), wanted=done)
            case Keep():
                return self._keep(own or {})
            case Lost():
                return self._keep(self._find_kept(done, why))
        return False

    def _find_kept(self, done: int, why: str) -> dict[int, F32]:
        """All who had it are dead. What servers have is as good, if it is of that step."""
        kept = self._read_kept(self._client.job)
        if self.state.find_step(kept) != done:
            raise DataLoss(
                f"the dense parameters behind step {done} are lost: {why}",
                hint="all workers died at once; a checkpoint (--protect ec+delta) is what all go back to then",
            )
        return {done: kept}

    def _read_kept(self, spec: JobSpec) -> F32:
        parts = []
        for index in self._indices:
            table = spec.tables[index]
            parts.append(self._client.records(index, 0, table.rows)[:, : table.dim].reshape(-1))
        return np.concatenate(parts)

    # --- Steps ---

    def take_grads(self) -> F32:
        """What backward has found, to be clipped and scaled in place; cleared from the parameters."""
        parameters = self.state.parameters
        self._has_grad = np.array([p.grad is not None for p in parameters], np.float32)
        self._grads = self.state.table.take_grads().copy()
        self._moves = np.zeros(0, np.float32)
        if self.state.buffers is not None:
            self._moves = self.state.buffers.take_grads().copy()
        return self._grads

    def exchange(self, step: int, rates: tuple[float, ...]) -> None:
        """The step's outcome: made with all others, or taken from one who has it. Who died meanwhile is waited for."""
        if step <= self._step:
            return
        self._moves *= np.float32(1.0 / self._seat.workers)
        parts = [self._make_payload(step)] if self._peers is None else self._gather(step)
        if parts is not None:
            self._update(parts, rates[self._indices[0]] if rates else self.state.rate)
            self._keep({step: self.state.take(step)})
        every = self._seat.dense_every
        if every is not None and step % every == 0:
            self.write(step)

    def write(self, step: int) -> None:
        """Lets servers have the state behind this step, if this is who does it and has it."""
        if self._seat.worker != 0 or self._step != step:
            return
        self.state.take(step)
        for index, table in zip(self._indices, self.state.tables, strict=True):
            whole.write_flat(self._client, index, table)

    def replace(self) -> None:
        """Somebody has loaded other values, in every worker."""
        if self._step >= 0:
            self._keep({self._step: self.state.take(self._step)})

    def _make_payload(self, step: int) -> F32:
        head = np.array([step, zlib.crc32(self.state.table.values.tobytes())], np.uint32).view(np.float32)
        return np.concatenate([head, self._has_grad, self._grads, self._moves])

    def _update(self, parts: list[F32], rate: float) -> None:
        """In the order of workers: sums of floats depend on it."""
        heads = [part[:HEAD_FLOATS].view(np.uint32).tolist() for part in parts]
        if any(head != heads[0] for head in heads):
            raise RegrowError(
                f"workers have different dense parameters, or are in different steps: {heads}",
                hint="every worker must build and load the same model; regrow.join() seeds torch for that",
            )
        total = parts[0][HEAD_FLOATS:].copy()
        for part in parts[1:]:
            total += part[HEAD_FLOATS:]
        count = len(self._has_grad)
        grads, moves = total[count : count + self._grads.size], total[count + self._grads.size :]
        self.state.update(grads, list(total[:count] > 0.0), moves, rate=rate)

    # --- The others ---

    def _gather(self, step: int) -> list[F32] | None:
        """What all have brought; None: this step's outcome was taken from somebody who had it."""
        payload, started, told = torch.from_numpy(self._make_payload(step)), time.monotonic(), False

        def tick() -> None:
            nonlocal told
            self._check(started)
            if not told and time.monotonic() - started > TELL_SECONDS:
                told = True
                self._seat.note_waiting(step)

        with self._client.pulse.rest():
            while not self._find_group(step, self._await_circle(tick)):
                tick()
                if self._step == step:
                    return None
                time.sleep(LOOK_SECONDS)
            found = self._try_to_gather(payload, tick)
        return self._gather(step) if found is None else found

    def _find_group(self, step: int, circle: CircleIs) -> bool:
        """Whether this step is to be made with all others. If not, its outcome may be here by now."""
        if self._group is not None and self._group.number == circle.number:
            return True
        if self._entered != circle.number:
            self._entered = circle.number
            self._show()
        choice, why = choose_for_step(step, circle=circle.number, others=self._look(circle))
        if isinstance(choice, Adopt):
            self._keep(self._fetch(circle, choice.worker), wanted=step)
        if isinstance(choice, Join):
            rank, size = self._seat.worker, self._seat.workers
            self._group = GlooGroup(circle.directory, number=circle.number, rank=rank, size=size)
        if not isinstance(choice, Await):
            log.info("circle %d: %s", circle.number, why)
        return isinstance(choice, Join)

    def _try_to_gather(self, payload: torch.Tensor, tick: Callable[[], None]) -> list[F32] | None:
        """None: of this circle comes nothing more; if the launcher does not know it yet, it makes another one."""
        assert self._peers is not None and self._group is not None
        peers, number = self._peers, self._group.number
        found = self._group.gather(payload, is_over=lambda: _is_after(peers.circle, number), tick=tick)
        if not isinstance(found, str):
            self._failed = 0
            return [part.numpy() for part in found]
        self._group, self._is_left = None, number
        if not _is_after(peers.circle, number):
            self._failed += 1
            if self._failed > GROUPS_FAILED_MAX:
                raise RegrowError(f"workers cannot exchange gradients: {found}")
            peers.complain(number, found)
        return None

    def _await_circle(self, tick: Callable[[], None]) -> CircleIs:
        assert self._peers is not None
        while (circle := self._peers.circle) is None or circle.number <= self._is_left:
            tick()
            time.sleep(LOOK_SECONDS)
        return circle

    def _look(self, circle: CircleIs) -> dict[int, Shown | None]:
        """What all others show."""
        assert self._peers is not None
        found: dict[int, Shown | None] = {}
        for worker, address in enumerate(circle.addresses):
            if worker != self._seat.worker:
                answer = ask(address, LOOK, self._peers.token)
                found[worker] = None if answer is None else msgspec.json.decode(answer, type=Shown)
        return found

    def _fetch(self, circle: CircleIs, worker: int) -> dict[int, F32]:
        """All states that a worker has; none if it is gone."""
        assert self._peers is not None
        body = ask(circle.addresses[worker], STATES, self._peers.token)
        states = {} if body is None else split_states(body)
        return {step: np.frombuffer(state, np.float32) for step, state in states.items()}

    # --- States ---

    def _keep(self, states: dict[int, F32], *, wanted: int | None = None) -> bool:
        """The newest of these is what holds from here on, or the one that is wanted, if it is among them."""
        if not states or (wanted is not None and wanted not in states):
            return False
        step = max(states) if wanted is None else wanted
        known = self._states | {n: state for n, state in states.items() if n <= step}
        self._states = {n: known[n] for n in sorted(known)[-STATES_KEPT:]}
        if wanted is not None or self._step < 0:
            self.state.put(self._states[step])
        self._step = step
        self._show()
        return True

    def _show(self) -> None:
        if self._board is None:
            return
        shown = Shown(steps=tuple(self._states), circle=self._entered)
        self._board.show(
            {step: state.data.cast("B") for step, state in self._states.items()}, msgspec.json.encode(shown)
        )

    def _check(self, started: float) -> None:
        """Whoever was replaced finds out here; and nobody waits for ever."""
        self._client.check()
        if time.monotonic() - started > OTHERS_SECONDS_MAX:
            raise ConnectionLost(f"other workers did not come within {OTHERS_SECONDS_MAX:.0f} s")


def _is_after(circle: CircleIs | None, number: int) -> bool:
    return circle is not None and circle.number > number

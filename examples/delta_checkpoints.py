"""Delta checkpoints of an ordinary torch model: trained, killed in the middle, resumed, with the same result.

python examples/delta_checkpoints.py                      # shows it: one run is killed, one is not
python examples/delta_checkpoints.py train DIRECTORY      # one run; start it again and it goes on
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from regrow.checkpoint import DeltaCheckpointer
from regrow.checkpoint.storage import Storage

ROWS, DIM, BATCH, STEPS, EVERY = 50_000, 16, 64, 120, 10


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.items = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.head = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.users(users), self.items(items)], dim=1)
        logits: torch.Tensor = self.head(both)[:, 0]
        return logits


def batch(position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch number `position` of the data set: the same whenever it is asked for."""
    draw = torch.Generator().manual_seed(position)
    ids = (torch.rand(2, BATCH, 4, generator=draw).square() * ROWS).long()
    clicks = ((ids[0, :, 0] + ids[1, :, 0]) % 3 == 0).float()
    return ids[0], ids[1], clicks


def train(directory: str, *, die_at: int | None = None) -> None:
    torch.manual_seed(0)
    model = ClickModel()
    tables = [model.users.weight, model.items.weight]
    optimizers = [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.Adam(model.head.parameters(), lr=0.01)]

    resume = None
    if Storage.open(directory).pieces():
        resume = DeltaCheckpointer.restore(model, directory, optimizers=optimizers)
        report = resume.report
        print(f"resumed at step {resume.step}: {report.bytes >> 10} KiB in {len(report.pieces)} pieces", flush=True)
    position = resume.extra["position"] if resume else 0

    with DeltaCheckpointer(model, directory, optimizers=optimizers, every=EVERY, resume=resume) as checkpointer:
        while position < STEPS:
            users, items, clicks = batch(position)
            loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicks)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            position += 1
            checkpointer.step(extra={"position": position})
            if position == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.numpy().tobytes())
    print(f"step {position}  loss {loss.item():.4f}  model_sha256 {digest.hexdigest()[:16]}")


def show() -> None:
    with tempfile.TemporaryDirectory() as directory:
        outputs = {}
        for name, deaths in (("not killed", [None]), ("killed", ["57", "103", None])):
            for death in deaths:
                command = [sys.executable, __file__, "train", str(Path(directory) / name), *([death] if death else [])]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                print(done.stdout + (f"killed at step {death}\n" if death else ""), end="", flush=True)
            outputs[name] = done.stdout.split()[-1]
        sizes = [(piece.name, piece.bytes) for piece in Storage.open(str(Path(directory) / "killed")).manifests()[0]]
        full = max(size for name, size in sizes if name.endswith("full"))
        deltas = [size for name, size in sizes if not name.endswith("full")]
        print(f"a full is {full >> 10} KiB, a delta {sum(deltas) // len(deltas) >> 10} KiB on average")
        print("the same model" if len(set(outputs.values())) == 1 else "NOT the same model")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], die_at=int(sys.argv[3]) if len(sys.argv) > 3 else None)
    else:
        show()

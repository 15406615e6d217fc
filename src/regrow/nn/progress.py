"""What a worker has done since its last report."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from regrow.metrics import ScoreHistogram


@dataclasses.dataclass(slots=True)
class Progress:
    """Counts of a worker. What is of the time since the last report is cleared with it."""

    step: int = 0
    samples: int = 0
    steps_before: int = 0  # of these: done before this worker began
    samples_before: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    wait_seconds: float = 0.0
    lookups: int = 0
    distinct: int = 0
    scores: ScoreHistogram = dataclasses.field(default_factory=ScoreHistogram)
    position: dict[str, Any] | None = None
    logged: dict[str, float] = dataclasses.field(default_factory=dict)  # what a script wants to be seen

    def add(self, *, step: int, samples: int, loss: float | None, plan: Any) -> None:
        """A step was made."""
        self.step = step
        self.samples += samples
        if loss is not None:
            self.loss_sum += loss * samples
            self.loss_samples += samples
        self.lookups += plan.lookups
        self.distinct += plan.distinct

    def clear(self) -> None:
        self.loss_sum, self.loss_samples, self.scores = 0.0, 0, ScoreHistogram()


class WithProgress:
    """What a job lets its script say of how it goes."""

    progress: Progress

    def score(self, logits: Tensor, labels: Tensor) -> None:
        """Lets the display show the AUC of what is trained on. Before `step`, if at all."""
        self.progress.scores.add(labels.detach().cpu().numpy(), logits.detach().float().cpu().numpy())

    def log(self, **values: float) -> None:
        """Numbers to be seen with the next report: on the display, and in metrics.jsonl."""
        self.progress.logged |= {name: float(value) for name, value in values.items()}

"""How a job judges: with the servers' present values, alone or together with the other workers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regrow.metrics import AUC, LogLoss, Metric
from regrow.nn.embedding import Features
from regrow.nn.feed import Feed
from regrow.nn.judging import adapt, predict_by_shape
from regrow.nn.lookup import Lookup, find_features
from regrow.nn.routes import Chosen, Routes
from regrow.nn.seat import Seat
from regrow.nn.together import Place
from regrow.runtime.client import Client

READ_AHEAD = 2  # batches of an evaluation that are asked for together

Find = Callable[[Any], list[Features]]
Predict = Callable[[Any], tuple[Tensor, Tensor]]


class WithEvaluation:
    """What a job lets its script do to judge a model."""

    workers: int
    _seat: Seat
    _routes: Routes
    _step: int
    _loops: int
    _loop_start: int
    _in_loop: bool
    _current: Any

    def __init__(self) -> None:
        super().__init__()
        self._reads: deque[Lookup] = deque()  # asked for, to be read only
        self._visited: tuple[int, int | None] | None = None  # where the last evaluation of all workers was,
        self._visits = 0  # and how many there were just there

    def _begin(self) -> Client:
        raise NotImplementedError

    def _read(self, sources: list[Features], chosen: Chosen) -> Lookup:
        raise NotImplementedError

    def refresh(self) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        raise NotImplementedError

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        metrics: Sequence[Any] | None = None,
        predict: Predict | None = None,
        features: Find | None = None,
        together: bool = False,
    ) -> dict[str, float]:
        """Judges the model with the servers' present values. `predict` gives (logits, labels) of a batch; left out, it
        is `model(batch.features), batch.labels`, or, of a pair, `model(batch[0]), batch[1]`. Metrics may be those of
        torchmetrics.

        Every worker that calls it goes through all of the loader and gets the same figures. `together`: every worker
        must call it, waits for the others, judges its share of the batches, and gets the figures of all.
        """
        judges: list[Metric] = [AUC(), LogLoss()] if metrics is None else [adapt(metric) for metric in metrics]
        predict = predict or (lambda batch: predict_by_shape(model, batch))
        find = features or find_features
        if together and self.workers > 1:
            if self._current is None:
                self.settle()  # all that was learned is judged
            else:  # what was pushed before this step is committed already, or its batch would not be here
                self._begin().drain()

            def judge(judges: Sequence[Metric], index: int, count: int) -> None:
                feed = Feed(loader, worker=index, workers=count, epochs=1, seed=self._seat.seed, together=False)
                feed.pass_over(0, lambda batch: 0)
                self._judge(model, feed.deal(), judges, predict, find)

            found = self._seat.judge(self._name_place(), judges, judge, steps=self.steps)
        else:
            self._judge(model, loader, judges, predict, find)
            found = {metric.name: metric.compute() for metric in judges}
        self._seat.note_metrics(found)
        return found

    def _name_place(self) -> Place:
        """Where in the script this is: the same in every worker, and in one that takes its place. Steps of the same
        loop are counted alike by all; how many it has in all may differ."""
        here = (self._loops, self._step - self._loop_start if self._in_loop else None)
        self._visits = self._visits + 1 if self._visited == here else 1
        self._visited = here
        return (*here, self._visits)

    def _judge(
        self, model: nn.Module, loader: Iterable[Any], judges: Sequence[Metric], predict: Predict, find: Find
    ) -> None:
        self.refresh()
        was_training = model.training
        model.eval()
        everything = self._routes.everything
        ahead: deque[Any] = deque()
        batches = iter(loader)
        try:
            with torch.no_grad():
                while True:
                    for batch in itertools.islice(batches, READ_AHEAD - len(ahead)):
                        ahead.append(batch)
                        self._reads.append(self._read(find(batch), everything))
                    if not ahead:
                        break
                    logits, labels = predict(ahead.popleft())
                    for metric in judges:
                        metric.update(labels.detach().cpu().numpy(), logits.detach().float().cpu().numpy())
        finally:
            self._reads.clear()
            model.train(was_training)

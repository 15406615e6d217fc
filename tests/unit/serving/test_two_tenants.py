"""Goal: whatever the two intervals, each tenant's pieces restore exactly the rows of its cut, and a cut that failed
loses nothing of the next, for either.

Method: hypothesis chooses the order of steps, checkpoints and publications, which of them fail, and when training goes
on while one is stored; after each, what storage has is restored independently and compared with the servers' rows.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from publishing import Run, make_run

from regrow.checkpoint.export import fill_initial
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import restore
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.manifests import table_infos
from regrow.checkpoint.storage import Storage
from regrow.core.cut import PUBLICATION_TENANT, TENANT

CUTS = itertools.product(("cut", "full"), (TENANT, PUBLICATION_TENANT), (True, False))
ACTIONS = st.sampled_from([("train", TENANT, True), *CUTS])


def read_back(run: Run, url: str, cut: str) -> dict[str, Any]:
    storage = Storage.open(url)
    plan, _ = Graph(storage.manifests()[0]).restore_plan(cut)
    found = {}
    for info in table_infos(run.job):
        found[info.name] = np.zeros((info.rows, info.dim), np.float32)
        for _ in fill_initial(found[info.name], info, seed=run.job.seed):
            pass

    def apply(piece: Manifest, chunk: Any) -> None:
        for name, rows in chunk.items():
            found[name][rows.ids] = rows.weight
            assert bool(rows.states) == (url == run.ckpt and name == "user"), "publications have weights only"

    restore(storage, plan, apply)
    return found


@settings(max_examples=40)
@given(st.lists(ACTIONS, min_size=3, max_size=14))
def test_each_tenant_restores_its_cuts(actions: list[tuple[str, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = make_run(Path(place))
        run.train()
        for kind, tenant, durable in actions:
            run.train(rows=3)
            if kind == "train":
                continue
            expected = {table.name: run.rows(table.name) for table in run.job.tables}
            write = run.begin(tenant, full=kind == "full")
            run.train(rows=4)  # while it is stored
            run.end(write, durable=durable)
            if not durable:
                continue
            url = run.url if tenant == PUBLICATION_TENANT else run.ckpt
            assert url is not None
            found = read_back(run, url, write.target)
            for name, rows in expected.items():
                assert found[name].tobytes() == rows.tobytes(), (name, kind, tenant)

"""Goal: what a script keeps with its checkpoints is never newer than their rows, and never lost for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from regrow.checkpoint.epochs import EpochWriter, find_newest_epochs
from regrow.checkpoint.extras import KEPT_MAX, Extras
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.core.cuts import WriteManifest
from regrow.core.identity import Identity
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.names import cut_id
from regrow.launch import checkpoints
from regrow.launch.orders import Assignment
from regrow.launch.saving import Extra
from regrow.nn.script import find_extra

SGD = OptimizerSpec(kind="sgd", learning_rate=0.1)
JOB = JobSpec(
    tables=(TableSpec(name="t", rows=4, dim=2, init_bound=0.1, optimizer=SGD),), servers=1, workers=1, mode="sync"
)


def test_the_newest_that_is_not_ahead_of_the_rows() -> None:
    extras = Extras()
    assert extras.pick((100,)) == {}
    for step in (3, 5, 9):
        extras.keep(step, f"of {step}")
    assert extras.pick((2,)) == {} and extras.is_new
    assert extras.pick((8, 1)) == {"script": "of 5"}
    assert extras.is_new, "that of step 9 is in no checkpoint"
    assert extras.pick((8, 1)) == {"script": "of 5"}, "later ones have it too"
    assert extras.pick((9, 1)) == {"script": "of 9"} and not extras.is_new


def test_so_many_are_kept_and_the_oldest_stays() -> None:
    extras = Extras([(0, "first")])
    for step in range(1, 100):
        extras.keep(step, str(step))
    assert len(extras.kept) == KEPT_MAX
    assert extras.kept[0] == (0, "first") and extras.kept[-1] == (99, "99")
    assert Extras([(0, "a")]).pick((7,)) == {"script": "a"}


def make_cut(number: int, step: int, chunk: str) -> WriteManifest:
    target = cut_id(step, f"x/{number}")
    return WriteManifest(number=number, source=None, target=target, marks=(step,), chunks=(chunk,), discard=())


@pytest.mark.parametrize("kind", ["files", "epochs"])
def test_what_comes_after_the_last_checkpoint_is_written_to_it(tmp_path: Path, kind: str) -> None:
    """Training is over and nothing is new but that: the same checkpoint has it."""
    common: dict[str, Any] = {"url": str(tmp_path), "run": "r", "starts": 0, "extra": {"config": {}}, "made_by": "test"}
    writer = ManifestWriter(encoding="raw", bits=32, **common) if kind == "files" else EpochWriter(**common)

    def read() -> dict[str, Any]:
        if kind == "epochs":
            found = find_newest_epochs(str(tmp_path))
            assert found is not None
            return found.target.extra
        ((manifest,), broken) = Storage.open(str(tmp_path)).manifests()
        assert not broken
        return manifest.target.extra

    writer.write_extra()  # there is nothing to write, and nothing to write it to
    chunk = "[]" if kind == "files" else '{"epoch": 1}'
    assert writer.write(JOB, make_cut(1, 7, chunk)).error == ""
    assert "script" not in read()
    writer.extras.keep(7, "late")
    writer.write_extra()
    assert read()["script"] == "late" and read()["run"] == "r"


def test_a_run_that_goes_on_has_it_and_keeps_it(tmp_path: Path) -> None:
    url = str(tmp_path / "ckpt")
    writer = ManifestWriter(url=url, run="r", starts=0, extra={}, made_by="test", encoding="raw", bits=32)
    writer.extras.keep(3, "kept")
    assert writer.write(JOB, make_cut(1, 7, "[]")).error == ""
    config = TrainConfig(script=("train.py",), resume=url, protection="full", ckpt=url)
    newest, _ = checkpoints.find_newest(url, run="r")
    for start in (checkpoints.find(config), newest):
        stored, saving = checkpoints.make_stored(start), checkpoints.plan_saving(config, run="s", start=start)
        assert stored is not None and stored.extra == "kept"
        assert saving is not None and saving.extras == (Extra(step=0, text="kept"),)
        who = Identity(role="worker", id=1, incarnation=0)
        told = Assignment(
            identity=who, token="", listen="", coordinator=None, threads=1, servers=1, frame_bytes_max=1, start=stored
        )
        assert find_extra(told) == "kept"
        newer = msgspec.structs.replace(saving, extras=(*saving.extras, Extra(step=9, text="newer")))
        assert find_extra(msgspec.structs.replace(told, saving=newer)) == "newer"

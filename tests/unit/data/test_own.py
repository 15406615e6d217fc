"""Goal: a data set that somebody has written is found, called once, and refused with what it lacks."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

from regrow.config import TrainConfig
from regrow.data.catalog import check_fit, open_dataset
from regrow.data.own import open_own
from regrow.errors import UserError

NUMBERS = itertools.count()
GOOD = """
from regrow.data import SyntheticDataset
calls = []
def make():
    calls.append(1)
    return SyntheticDataset(rows=[50, 20], dense_features=3, train_rows=100, epochs=2)
class Maker:
    make = staticmethod(make)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a module in the current directory, and gives its name: one that no test had before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(text: str) -> str:
        name = f"own_data_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return make


def test_it_is_the_data_and_gives_the_model_its_tables(write) -> None:
    name = write(GOOD)
    config = TrainConfig(data=f"{name}:make", model="tiny", batch=10)
    model = check_fit(config)
    assert (model.rows, model.tables, model.dense_features, model.dim) == ((50, 20), 2, 3, 8)
    dataset = open_dataset(config)
    assert len(list(dataset.train_batches(batch=10, worker=0, workers=1))) == 20
    assert len(__import__(name).calls) == 1
    assert open_own(f"{name}:Maker.make").rows == [50, 20]


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("x = 1", "make", "{name} has no make"),
        ("make = 1", "make", "make is no function"),
        (
            "def make(): return 5",
            "make",
            "what make() returned (int) is no data set: it lacks rows, dense_features, epochs, skip_bad_lines, "
            "train_rows, train_batches(), test_batches(), train_rows_total()",
        ),
        (
            "from regrow.data import SyntheticDataset\ndef make():\n    it = SyntheticDataset(rows=[5])\n"
            "    it.rows = []\n    return it",
            "make",
            "what make() returned (SyntheticDataset) has rows = [], which must be a list of table sizes from 1 up",
        ),
        (
            "from regrow.data import SyntheticDataset\ndef make():\n    it = SyntheticDataset(rows=[5])\n"
            "    it.epochs = 0\n    return it",
            "make",
            "what make() returned (SyntheticDataset) has epochs = 0, which must be a whole number from 1 up",
        ),
    ],
)
def test_what_is_no_data_set_is_refused(write, text: str, function: str, message: str) -> None:
    name = write(text)
    with pytest.raises(UserError) as caught:
        check_fit(TrainConfig(data=f"{name}:{function}", model="tiny"))
    assert caught.value.message == f"data = '{name}:{function}': {message.replace('{name}', name)}"


def test_modules_that_are_not_there(write) -> None:
    with pytest.raises(UserError) as caught:
        check_fit(TrainConfig(data="cvs:file.csv"))
    assert (caught.value.message, caught.value.hint) == (
        "data = 'cvs:file.csv': there is no module cvs",
        "did you mean 'csv'?",
    )
    name = write("import nothing_of_this_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):  # its author's, with the traceback
        open_own(f"{name}:make")


def test_what_it_decides_itself_cannot_be_said(write) -> None:
    name = write(GOOD)
    with pytest.raises(UserError, match=f"epochs = 3: {name}:make makes 2 by itself"):
        check_fit(TrainConfig(data=f"{name}:make", epochs=3))
    with pytest.raises(UserError, match=f"rows_max = 10: the tables of {name}:make have up to 50 rows"):
        check_fit(TrainConfig(data=f"{name}:make", rows_max=10))
    endless = write(
        """
        from regrow.data import SyntheticDataset
        class Endless(SyntheticDataset):
            def train_rows_total(self):
                return None
        def make():
            return Endless(rows=[5])
        """
    )
    with pytest.raises(UserError, match="does not say how long it is"):
        check_fit(TrainConfig(data=f"{endless}:make"))
    assert check_fit(TrainConfig(data=f"{endless}:make", steps=5)).rows == (5,)

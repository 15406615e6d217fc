"""Goal: a schema says what it means, or what is wrong with it, in one sentence with the file, the key and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from regrow.config import TrainConfig
from regrow.data.catalog import table_rows
from regrow.data.columns import make_parser
from regrow.data.schema import KEYS, Categorical, Dense, Schema, load_schema
from regrow.errors import UserError
from regrow.nn.presets import MODELS

ROOT = Path(__file__).parents[3]
SMALLEST = '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "c"\nid = "hash"\nrows = 9\n'


def load(tmp_path: Path, text: str) -> Schema:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return load_schema(path)


def test_everything_it_can_say(tmp_path: Path) -> None:
    (tmp_path / "cities.txt").write_bytes(b"Oslo\r\nParis\r\n\xff\n")
    schema = load(
        tmp_path,
        """
        delimiter = "\\t"
        [label]
        column = "rating"
        threshold = 4
        [[dense]]
        column = "age"
        missing = -1
        [[dense]]
        columns = ["price", "time"]
        transform = "log1p"
        [[categorical]]
        columns = ["user", "film"]
        id = "hash"
        rows = 1000
        missing = 0
        [[categorical]]
        column = "shop"
        id = "int"
        rows = 50
        missing = "empty"
        [[categorical]]
        column = "genres"
        id = "vocabulary"
        words = ["Action", "War"]
        many = true
        [[categorical]]
        column = "cities"
        id = "vocabulary"
        words_file = "cities.txt"
        many = true
        separator = ";"
        """,
    )
    assert schema == Schema(
        path=tmp_path / "s.toml",
        label="rating",
        threshold=4.0,
        delimiter="\t",
        dense=(
            Dense(column="age", missing=-1.0),
            Dense(column="price", transform="log1p"),
            Dense(column="time", transform="log1p"),
        ),
        categorical=(
            Categorical(column="user", id="hash", rows=1000, missing=0),
            Categorical(column="film", id="hash", rows=1000, missing=0),
            Categorical(column="shop", id="int", rows=50),
            Categorical(column="genres", id="vocabulary", rows=3, words=("Action", "War"), separator="|"),
            Categorical(column="cities", id="vocabulary", rows=4, words=("Oslo", "Paris", "\udcff"), separator=";"),
        ),
    )
    assert schema.columns == ["rating", "age", "price", "time", "user", "film", "shop", "genres", "cities"]
    assert (schema.rows, schema.dense_features) == ((1000, 1000, 50, 3, 4), 3)
    make_parser(schema, fields=schema.columns, rows=schema.rows)


def test_the_smallest(tmp_path: Path) -> None:
    schema = load(tmp_path, SMALLEST)
    assert (schema.threshold, schema.delimiter, schema.dense) == (None, ",", ())
    # A model has at least one dense feature.
    assert schema.dense_features == 1


@pytest.mark.parametrize("name", ["movielens.toml", "avazu.toml"])
def test_examples_can_be_read(name: str) -> None:
    schema = load_schema(ROOT / "examples" / name)
    make_parser(schema, fields=schema.columns, rows=schema.rows)


def test_schemas_in_the_docs_can_be_read(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    schemas = [load(tmp_path, block) for block in blocks]
    assert [schema.label for schema in schemas] == ["rating", "click"]
    page = (ROOT / "docs" / "data.md").read_text()
    assert [key for keys in KEYS.values() for key in keys if f"`{key}`" not in page and f"[{key}]" not in page] == []


CATEGORY = '[label]\ncolumn = "y"\n[[categorical]]\ncolumn = "c"\n'
DENSE = SMALLEST + '[[dense]]\ncolumn = "d"\n'
WRONG = [
    ("lable = 1\n" + SMALLEST, "unknown key 'lable'", "did you mean 'label'?"),
    ("", "label: is missing", '[label]\ncolumn = "..."'),
    ('label = "y"', "label = 'y': must be a table", '[label]\ncolumn = "..."'),
    ("[label]\nthreshold = 4", "[label] column: is missing", None),
    ('[label]\ncolumn = "y"\nthreshold = "4"\n', "[label] threshold = '4': must be a number", None),
    ('[label]\ncolumn = "y"\n', "categorical: is missing", "a model needs at least one column of ids: [[categorical]]"),
    (
        '[label]\ncolumn = "y"\n[categorical]\ncolumn = "c"\n',
        "categorical = {'column': 'c'}: must be a list of tables",
        "write [[categorical]] above each",
    ),
    (CATEGORY + "rows = 5", "[[categorical]] 'c': id: is missing", None),
    (
        CATEGORY + 'id = "hsh"\nrows = 5',
        "[[categorical]] 'c': id = 'hsh': must be one of hash, int, vocabulary",
        "did you mean 'hash'?",
    ),
    (CATEGORY + 'id = "hash"', "[[categorical]] 'c': rows: is missing", "how many rows the table of this column has"),
    (
        CATEGORY + 'id = "int"\nrows = 0',
        "[[categorical]] 'c': rows = 0: must be a whole number from 1 to 4294967295",
        "how many rows the table of this column has",
    ),
    (
        CATEGORY + 'id = "int"\nrows = 5\nmissing = 5',
        "[[categorical]] 'c': missing = 5: must be \"empty\" or a row from 0 to 4",
        None,
    ),
    (
        CATEGORY + 'id = "hash"\nrows = 1\nmissing = 0',
        "[[categorical]] 'c': rows = 1: the row of missing values leaves none for others",
        "2 rows or more",
    ),
    (
        CATEGORY + 'id = "hash"\nrows = 5\nwords = ["a"]',
        "[[categorical]] 'c': words = ['a']: goes with a vocabulary, and id is hash",
        'id = "vocabulary"',
    ),
    (
        CATEGORY + 'id = "vocabulary"\nrows = 5\nwords = ["a"]',
        "[[categorical]] 'c': rows = 5: follows from the words of a vocabulary: one more than there are",
        "leave it out",
    ),
    (CATEGORY + 'id = "vocabulary"', "[[categorical]] 'c': words: is missing", "words, or words_file"),
    (CATEGORY + 'id = "vocabulary"\nwords = []', "[[categorical]] 'c': words = []: has no words", None),
    (
        CATEGORY + 'id = "vocabulary"\nwords = ["a", "b", "a"]',
        "[[categorical]] 'c': words = ['a', 'b', 'a']: has 'a' twice",
        None,
    ),
    (
        CATEGORY + 'id = "vocabulary"\nwords_file = "none.txt"',
        "[[categorical]] 'c': words_file = 'none.txt': cannot read {folder}/none.txt: No such file or directory",
        None,
    ),
    (
        CATEGORY + 'id = "hash"\nrows = 5\nseparator = ";"',
        "[[categorical]] 'c': separator = ';': goes with columns of many values",
        "many = true",
    ),
    (
        CATEGORY + 'id = "hash"\nrows = 5\nmany = true\nseparator = "::"',
        "[[categorical]] 'c': separator = '::': must be one ASCII character, and no quote or end of line",
        None,
    ),
    (CATEGORY + 'id = "hash"\nrows = 5\nmany = 1', "[[categorical]] 'c': many = 1: must be true or false", None),
    (
        DENSE + 'transform = "log"',
        "[[dense]] 'd': transform = 'log': must be one of none, log1p",
        "did you mean 'log1p'?",
    ),
    (DENSE + 'missing = "x"', "[[dense]] 'd': missing = 'x': must be a number", None),
    (DENSE + "missing = 1e300", "[[dense]] 'd': missing = 1e+300: does not fit 32 bits", None),
    (DENSE + 'columns = ["e"]', "[[dense]] 'd': column = 'd': columns is given too", "give one of the two"),
    (SMALLEST + "[[dense]]\nmissing = 1", "[[dense]] column: is missing", "give one of the two"),
    (SMALLEST + "[[dense]]\ncolumns = []", "[[dense]] []: columns = []: must be a list of names", None),
    (SMALLEST + '[[dense]]\ncolumn = "c"', "column 'c' is named twice", "a column has one use"),
]


@pytest.mark.parametrize(("text", "message", "hint"), WRONG, ids=[wrong[1] for wrong in WRONG])
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    assert caught.value.message == f"{tmp_path / 's.toml'}: " + message.replace("{folder}", str(tmp_path))
    assert caught.value.hint == hint


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none.toml: No such file"):
        load_schema(tmp_path / "none.toml")


# --- the model follows ---


def config(tmp_path: Path, **options: object) -> TrainConfig:
    (tmp_path / "s.toml").write_text(
        '[label]\ncolumn = "y"\n[[dense]]\ncolumns = ["a", "b"]\n'
        '[[categorical]]\ncolumn = "c"\nid = "int"\nrows = 5000\n'
        '[[categorical]]\ncolumn = "d"\nid = "hash"\nrows = 7\nmissing = 4\n'
    )
    return TrainConfig(data="csv:x.csv", schema=str(tmp_path / "s.toml"), **options)


def test_a_preset_takes_its_tables_from_the_schema(tmp_path: Path) -> None:
    """Also those larger than the preset's own cap, which belongs to other data."""
    model = config(tmp_path, model="tiny").load_model()
    assert (model.dim, model.bottom, model.top) == (8, (32, 8), (32, 1))
    assert (model.tables, model.dense_features, table_rows(model)) == (2, 2, [5000, 7])
    assert table_rows(config(tmp_path, model="tiny", rows_max=100).load_model()) == [100, 7]


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_preset_fits_a_small_schema(tmp_path: Path, model: str) -> None:
    made = config(tmp_path, model=model).load_model()
    assert (made.tables, made.dense_features, made.dim) == (2, 2, MODELS[model].dim)


def test_two_towers_need_two_tables(tmp_path: Path) -> None:
    """Each has half of them, the query the smaller half, unless a file says otherwise."""
    assert config(tmp_path, model="two-tower").load_model().query_tables == 1
    config(tmp_path)
    (tmp_path / "s.toml").write_text(SMALLEST)
    with pytest.raises(UserError, match="query_tables 0 of 1: a tower is empty; the tables are those of"):
        TrainConfig(data="csv:x.csv", schema=str(tmp_path / "s.toml"), model="two-tower").load_model()


def test_a_model_in_a_file_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    shape = "dim = 4\nbottom = [4]\ntop = [1]\n"
    path.write_text(shape + "rows_max = 50\ntables = 2\ndense_features = 2\n")
    assert table_rows(config(tmp_path, model=str(path)).load_model()) == [50, 7]
    for wrong, message in {
        "tables = 3": "model m has tables = 3, but {schema} has 2",
        "dense_features = 1": "model m has dense_features = 1, but {schema} has 2",
        "rows = [1, 2]": "model m: its rows are those of {schema}",
    }.items():
        path.write_text(shape + wrong)
        with pytest.raises(UserError) as caught:
            config(tmp_path, model=str(path)).load_model()
        assert caught.value.message == message.replace("{schema}", str(tmp_path / "s.toml"))
        assert caught.value.hint is not None


def test_a_table_cut_below_its_row_of_missing_values(tmp_path: Path) -> None:
    schema = load_schema(config(tmp_path).schema or "")
    with pytest.raises(UserError, match="missing values in row 4, but its table is cut to 3 rows") as caught:
        make_parser(schema, fields=schema.columns, rows=[3, 3])
    assert caught.value.hint == "rows_max = 5 or more, or another row for missing values"

"""Goal: the checkpoint commands that only read say what there is and name what is wrong, and every mistake is answered
with a line or two. Those that write are in checkpoint/test_maintain.py.

Method: the entry point is called in process on the store of ckpt_run.py. Files are damaged by hand. Whole outputs are
compared where they are stable; numbers with what stupid code finds in the world's own copies.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckpt_run import Run, cut, flip, name, tear
from safetensors.numpy import load_file
from worlds import TABLES, Model

from regrow.checkpoint.manifest import MANIFEST
from regrow.cli import ckpt as ckpt_cli
from regrow.cli import ckpt_views
from regrow.cli import main as cli
from regrow.units import parse_seconds

# -- ls and show -------------------------------------------------------------------------------------------

LS = """\
cut                    step  age      pieces           rows     size  restore reads
● 0000000100-ee1e5d     100  5 h ago  full               12  1.1 KiB  1 piece, 1.1 KiB
● 0000000200-f1550b     200  5 h ago  delta from 100      9  1.1 KiB  2 pieces, 2.3 KiB
● 0000000300-8a08a2     300  5 h ago  delta from 200     12  1.1 KiB  1 piece, 1.6 KiB
                                      full               27  1.6 KiB
● 0000000400-50d43c     400  5 h ago  merged from 100    23  1.6 KiB  2 pieces, 2.7 KiB
                                      delta from 300     11  1.1 KiB
● 0000000500-a09d62     500  5 h ago  delta from 400     12  1.1 KiB  3 pieces, 3.8 KiB
├─● 0000000600-b85ca6   600  5 h ago  delta from 500     11  1.2 KiB  4 pieces, 5.0 KiB
● 0000000610-b3ca8e     610  5 h ago  delta from 500     12  1.4 KiB  4 pieces, 5.2 KiB
● 0000000710-63e39f     710  5 h ago  delta from 610      8    952 B  5 pieces, 6.1 KiB  <- newest

8 cuts, 8 restorable; 10 pieces, 12.3 KiB on storage
"""


def test_ls_shows_the_tree(run: Run) -> None:
    assert run("ckpt ls URL") == LS
    assert run("ckpt ls file://URL") == LS


def test_ls_says_what_cannot_be_restored_and_why(run: Run) -> None:
    shutil.rmtree(run.path / name(run, 610, 500))
    tear(run, name(run, 600, 500))
    (run.path / f"0000000900-aaaaaa.{cut(run, 300)}").mkdir()
    text = run("ckpt ls URL")
    assert "○ 0000000710-63e39f  " in text
    assert "not restorable: nothing leads to 0000000610-b3ca8e\n" in text
    assert text.splitlines()[-3:] == [
        "6 cuts, 5 restorable; 8 pieces, 9.7 KiB on storage",
        "cannot be read: 0000000600-b85ca6.0000000500-a09d62: damaged or not a manifest (its ends are not there)",
        "1 unfinished piece, 0 B, last written to 0 s ago; `regrow ckpt prune` deletes old ones",
    ]
    found = json.loads(run("ckpt ls URL --json"))
    assert [each["step"] for each in found["cuts"] if not each["restorable"]] == [710]
    assert found["cuts"][-1]["why_not"] == "nothing leads to 0000000610-b3ca8e"
    assert (found["newest"], len(found["broken"]), len(found["unfinished"])) == (cut(run, 500), 1, 1)


def test_ls_tells_of_a_damaged_manifest_on_the_way(run: Run) -> None:
    tear(run, name(run, 610, 500))
    assert "not restorable: 0000000610-b3ca8e.0000000500-a09d62 is damaged\n" in run("ckpt ls URL")


def test_ls_as_json(run: Run) -> None:
    found = json.loads(run("ckpt ls URL --json"))
    newest = found["cuts"][-1]
    plan, _ = run.world.graph().restore_plan()
    assert found["newest"] == newest["id"] == plan.target.id
    assert newest["parent"] == cut(run, 610)
    assert newest["restore"] == {
        "pieces": [piece.name for piece in plan.pieces],
        "bytes": plan.bytes,
        "rows": plan.rows,
        "exact": True,
    }
    assert [piece["kind"] for piece in found["cuts"][3]["pieces"]] == ["merged", "delta"]


def test_ls_of_nothing(empty: Run) -> None:
    assert empty("ckpt ls URL") == "no checkpoints at URL\n"
    assert json.loads(empty("ckpt ls URL --json"))["cuts"] == []


def test_ls_tells_that_a_full_was_asked_for(run: Run) -> None:
    flip(run, name(run, 710, 610))
    tear(run, name(run, 710, 610))
    run("merge --once URL")
    assert "training was asked for a full: cut 0000000710-63e39f cannot be restored" in run("ckpt ls URL")


SHOW = """\
cut              0000000400-50d43c, step 400
created          (when)
trained on from  0000000300-8a08a2
marks            none
job              {}
extra            {}
seed             1
restore          2 pieces, 2.7 KiB, exact

table  rows  dim  optimizer state                rows to write
user     60    3  momentum1 (1)                             17
item     25    2  -                                         12
place     7    1  momentum1 (1), exp_avg_sq (1)              6

piece                                kind    rows     size  chunks  encoding  bits  made by
0000000100-ee1e5d.full               full      12  1.1 KiB       2  raw         32  test
0000000400-50d43c.0000000100-ee1e5d  merged    23  1.6 KiB       2  raw         32  regrow merge
"""


def test_show(run: Run) -> None:
    lines = run("ckpt show URL@400").splitlines()
    assert lines[1].endswith(" (5 h ago)")
    lines[1] = "created          (when)"
    assert "\n".join([*lines, ""]) == SHOW


def test_show_chunks_graph_and_json(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "lineage.svg"
    text = run(f"ckpt show URL@50 --chunks --graph {picture}".replace("@50", "@0000000500"))
    way = run.world.graph().path(cut(run, 500)) or []
    for piece in way:
        for info in piece.chunks:
            assert f"{piece.name}/{info.name}" in text and f"{info.crc32c:08x}" in text
    assert picture.read_text().startswith("<svg") and run.err.startswith("drawn: ")
    found = json.loads(run("ckpt show URL@500 --json"))
    assert [piece["name"] for piece in found["way"]] == [piece.name for piece in way]
    assert found["tables"][0]["states"] == {"momentum1": 1}
    assert run.fails(f"ckpt show URL --graph {tmp_path}/no/x.svg", code=2)[0].endswith("No such file or directory")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["lineage.svg"]


def test_show_of_a_cut_that_is_lost(run: Run) -> None:
    shutil.rmtree(run.path / name(run, 610, 500))
    text = run("ckpt show URL@710")
    assert "restore          not possible: nothing leads to 0000000610-b3ca8e\n" in text
    assert name(run, 710).replace("full", "0000000610-b3ca8e") in text


# -- verify ------------------------------------------------------------------------------------------------


def test_verify_of_what_is_sound(run: Run) -> None:
    assert run("ckpt verify URL") == "no damage: 10 pieces, 12.3 KiB read; all 8 cuts restorable\n"
    text = run("ckpt verify URL --quick")
    assert text == "no damage: 10 pieces, sizes looked at, contents not read; all 8 cuts restorable\n"


def test_verify_names_all_damage(run: Run) -> None:
    flipped, gone, torn = name(run, 600, 500), name(run, 200, 100), name(run, 710, 610)
    file = flip(run, flipped)
    missing = run.piece(gone).chunks[0].name
    (run.path / gone / missing).unlink()
    tear(run, torn)
    (run.path / name(run, 300) / "s0of2-00099.safetensors").write_bytes(b"")
    surplus = f"{name(run, 300)}/s0of2-00099.safetensors"
    assert run("ckpt verify URL", code=1).splitlines() == [
        f"damaged   {gone}/{missing}: missing",
        f"damaged   {flipped}/{file}: damaged (checksum)",
        f"damaged   {torn}/{MANIFEST}: damaged or not a manifest (its ends are not there)",
        f"harmless  {surplus}: not in the manifest: left behind by a process that died, or by a second merger",
        f"lost      cut {gone[:17]} cannot be restored: what is damaged is on every way to it",
        f"lost      cut {flipped[:17]} cannot be restored: what is damaged is on every way to it",
        f"lost      cut {torn[:17]} cannot be restored: its manifest cannot be read",
        "3 problems; 10 pieces, 11.4 KiB read; 5 cuts restorable, 3 not",
    ]
    assert flipped not in run("ckpt verify URL --quick", code=1)
    found = json.loads(run("ckpt verify URL --json", code=1))
    assert found["cuts_lost"] == [gone[:17], flipped[:17], torn[:17]]
    assert [problem["harmful"] for problem in found["problems"]] == [True, False, True, True]


def test_verify_of_what_only_takes_space(run: Run) -> None:
    (run.path / f"0000000900-aaaaaa.{cut(run, 300)}").mkdir()
    assert run("ckpt verify URL").startswith("harmless  0000000900-aaaaaa")


def test_verify_finds_that_a_whole_piece_is_gone(run: Run) -> None:
    shutil.rmtree(run.path / name(run, 610, 500))
    lines = run("ckpt verify URL", code=1).splitlines()
    assert lines[0] == f"lost      cut {cut(run, 710)} cannot be restored: nothing leads to 0000000610-b3ca8e"
    assert lines[1] == "0 problems; 9 pieces, 10.9 KiB read; 6 cuts restorable, 1 not"


def test_a_bar_is_shown_to_those_who_wait(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ckpt verify URL")
    assert run.err == ""
    monkeypatch.setattr(ckpt_views, "BAR_AFTER_SECONDS", -1.0)
    run("ckpt verify URL")
    assert run.err == ""  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    run("ckpt verify URL")
    assert "verifying" in run.err
    run(f"ckpt export URL --to {tmp_path / 'model'}")
    assert "exporting" in run.err


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    console = functools.partial(ckpt_views.Console, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(ckpt_views, "Console", console)


LS_NARROW = """\
cut                    step  pieces              size  restore reads
● 0000000100-ee1e5d     100  full             1.1 KiB  1 piece, 1.1 KiB
● 0000000200-f1550b     200  delta from 100   1.1 KiB  2 pieces, 2.3 KiB
● 0000000300-8a08a2     300  delta from 200   1.1 KiB  1 piece, 1.6 KiB
                             full             1.6 KiB
"""


def test_a_narrow_terminal(run: Run, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are left out rather than broken, but for the last one; what is left fits."""
    text = run("ckpt ls URL")
    assert text.startswith(LS_NARROW)
    for line in ("ckpt ls URL", "ckpt show URL@710", "ckpt prune URL --keep-last 1 --dry-run", "ckpt diff URL 100 710"):
        lines = run(line).splitlines()
        assert all(len(each) <= 80 for each in lines), line
        for piece in run.world.graph().restore_plan()[0].pieces:
            assert line.startswith(("ckpt ls", "ckpt diff")) or any(piece.name in each for each in lines), line
    assert max(map(len, run("ckpt show URL@710 --chunks").splitlines())) <= 80


# -- export and diff ---------------------------------------------------------------------------------------


def test_export(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    text = run(f"ckpt export URL@400 --to {target} --prefix net.")
    assert text.startswith(f"{target}: 3 tensors, ") and text.endswith(f", cut {cut(run, 400)}\n")
    tensors = load_file(target)
    for (table, row), record in run.world.history[cut(run, 400)].items():
        found = tensors[f"net.embedding_bags.{table}.weight"][row]
        assert found.tobytes() == record[: found.nbytes]
    assert run.fails(f"ckpt export URL@400 --to {target}", code=2)[0] == f"error: {target} is there already"
    assert run.fails(f"ckpt export URL@400 --to {target}/x", code=2)[0].startswith(f"error: cannot write {target}/x")


def test_export_for_dcp_and_around_damage(run: Run, tmp_path: Path) -> None:
    flip(run, name(run, 300))
    run(f"ckpt export URL@300 --to {tmp_path / 'dcp'} --format dcp")
    assert (tmp_path / "dcp" / ".metadata").is_file()
    assert run.err.startswith(f"gone around: {name(run, 300)}/")


def stupid_diff(left: Model, right: Model) -> list[dict[str, Any]]:
    found = []
    for table in TABLES:
        one, other = ({row: value for (t, row), value in m.items() if t == table.name} for m in (left, right))
        both = one.keys() & other.keys()
        changed = [row for row in both if one[row] != other[row]]
        changes = [
            abs(float(b) - float(a))
            for row in changed
            for a, b in zip(weight(one[row], table.dim), weight(other[row], table.dim), strict=True)
        ]
        found.append(
            {
                "table": table.name,
                "same": len(both) - len(changed),
                "changed": len(changed),
                "only_left": len(one.keys() - other.keys()),
                "only_right": len(other.keys() - one.keys()),
                "largest": max(changes, default=None),
                "mean": pytest.approx(sum(changes) / len(changes)) if changes else None,
                "not_finite": 0,
                "note": "",
                "equal": len(both) == len(one) == len(other) and not changed,
            }
        )
    return found


def weight(record: bytes, dim: int) -> Any:
    return np.frombuffer(record, np.float32)[:dim]


@pytest.mark.parametrize("shuffled", [False, True])
def test_diff_is_what_stupid_code_finds(shuffled: bool, run: Run) -> None:
    if shuffled:
        run.world.shuffled = True
        run.world.update(60)
        run.save(800)
        run.save(900)
    history = run.world.history
    for one, other in itertools.pairwise([*history, next(iter(history))]):
        found = json.loads(run(f"ckpt diff URL@{one} URL@{other} --json"))
        assert (found["left"], found["right"], found["note"]) == (one, other, None)
        assert found["tables"] == stupid_diff(history[one], history[other])


DIFF = """\
1st 0000000100-ee1e5d (step 100), 2nd 0000000400-50d43c (step 400)
table  changed  same  only in 1st  only in 2nd  largest change  mean change
user         0     6            0           11               -            -
item         1     3            0            7         1.89444      1.15154
place        1     1            0            3          3.2133       3.2133
"""


def test_diff_of_one_url(run: Run) -> None:
    for line in ("ckpt diff URL@100 URL@400", "ckpt diff URL@100 @400", "ckpt diff URL 100 400"):
        assert run(line) == DIFF


def test_diff_of_a_copy_and_around_damage(run: Run, tmp_path: Path) -> None:
    run(f"ckpt restore URL@400 --to {tmp_path / 'b'}")
    flip(run, name(run, 400, 100))
    assert run(f"ckpt diff URL@400 {tmp_path / 'b'}").endswith("the two cuts are equal, bit by bit\n")
    assert run.err.startswith("gone around: ")
    flip(run, name(run, 710, 610))
    assert "there is no way around" in run.fails("ckpt diff URL 400 710", code=1)[0]


def test_diff_of_values_that_are_not_finite(empty: Run) -> None:
    empty.save(1)
    key = next(key for key in empty.world.model if key[0] == "item")
    empty.world.model[key] = np.array([np.nan, 1.0], np.float32).tobytes()
    empty.world.changed.add(key)
    empty.world.step = 2
    empty.world.save()
    assert empty("ckpt diff URL 1 2").splitlines()[3].endswith("  1 not finite")
    assert empty("ckpt diff URL 2 latest").endswith("equal, bit by bit\n")


def test_the_documented_way_to_read_without_regrow(run: Run) -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    space: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], space)
    dims = {table.name: table.dim for table in TABLES}
    for wish, model in run.world.history.items():
        found = {(t, row): value for t, rows in space["read"](run.url, wish).items() for row, value in rows.items()}
        assert found.keys() == model.keys()
        for key, value in found.items():
            assert value.tobytes() == weight(model[key], dims[key[0]]).tobytes()


def test_the_documented_commands_exist() -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    named = {line.split()[2] for line in text.partition("```\n")[2].splitlines() if line.startswith("regrow ckpt ")}
    assert named == set(ckpt_cli.ckpt.commands)


# -- mistakes ----------------------------------------------------------------------------------------------


MISTAKES: list[tuple[str, int, str]] = [
    ("ckpt ls NOWHERE", 2, "error: NOWHERE is not there"),
    ("ckpt show NOWHERE@5", 2, "error: NOWHERE is not there"),
    ("ckpt ls FILE", 2, "error: FILE is not a directory"),
    ("ckpt ls nosuch://x/y", 2, "error: nosuch://x/y is not a URL that can hold checkpoints: Protocol not known"),
    ("ckpt ls file://x", 2, "error: file://x is not a URL of a directory"),
    ("ckpt show EMPTY", 2, "error: EMPTY has no checkpoints"),
    ("ckpt verify EMPTY", 2, "error: EMPTY has no checkpoints"),
    ("ckpt merge EMPTY", 2, "error: EMPTY has no checkpoints"),
    ("ckpt prune EMPTY", 2, "error: EMPTY has no checkpoints"),
    ("ckpt restore EMPTY@latest --to x", 2, "error: EMPTY has no checkpoints"),
    ("ckpt ls URL@5", 2, "error: `regrow ckpt ls` is about all cuts and takes a URL without @5"),
    ("ckpt show URL@", 2, "error: URL@: a cut has to follow the @"),
    (
        "ckpt show URL@350",
        2,
        "error: URL has no cut '350'; near it: 0000000200-f1550b (step 200), 0000000300-8a08a2 (step 300), "
        "0000000400-50d43c (step 400)",
    ),
    ("ckpt show URL@latst", 2, "error: URL has no cut 'latst'; near it: latest"),
    ("ckpt show URL@0000000", 2, "error: URL: 8 cuts are '0000000'; there are 0000000710-63e39f (step 710), "),
    ("ckpt restore URL", 2, "error: Missing option '--to'."),
    ("ckpt restore URL --to URL/", 2, "error: URL/ is where the cut is already"),
    ("ckpt prune URL --keep-last 0", 2, "error: --keep-last 0: at least the newest cut has to stay"),
    (
        "ckpt prune URL --keep-full-every often",
        2,
        "error: Invalid value for '--keep-full-every': 'often' is not a time",
    ),
    ("ckpt prune URL --keep 999", 2, "error: URL has no cut '999'; near it: "),
    ("ckpt diff URL", 2, "error: two cuts are compared"),
    ("ckpt merge URL --approximate", 2, "error: --approximate needs --from or --to"),
    ("ckpt export URL --to x --format onnx", 2, "error: Invalid value for '--format': 'onnx' is not one of"),
    ("ckpt lst URL", 2, "error: No such command 'lst'."),
]


@pytest.mark.parametrize("line, code, message", MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_mistakes(line: str, code: int, message: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("")
    for word in ("NOWHERE", "FILE", "EMPTY"):
        line = line.replace(word, str(tmp_path / word))
    found = run.fails(line, code=code)[0].replace(f"{tmp_path}/", "")
    assert found.startswith(message)
    assert run.out == ""


def test_damaged_manifests(run: Run) -> None:
    tear(run, name(run, 710, 610))
    lines = run.fails("ckpt show URL@710", code=1)
    assert lines[0].startswith("error: cut 0000000710-63e39f cannot be read: 0000000710-63e39f.0000000610-b3ca8e/mani")
    assert run("ckpt show URL@latest").startswith(f"cut              {cut(run, 610)}")
    for piece in run.world.graph().pieces:
        tear(run, piece)
    lines = run.fails("ckpt show URL", code=1)
    assert lines[0].startswith("error: URL: no manifest can be read (10 damaged); 0000000100-ee1e5d.full: damaged")
    assert lines[1] == "hint: `regrow ckpt verify URL` lists all damage"
    assert run("ckpt verify URL", code=1).count("damaged   ") == 10
    assert run("ckpt ls URL").startswith("no checkpoints at URL\ncannot be read: ")


def test_defaults_are_those_of_the_package() -> None:
    """Written again in cli/ckpt.py because help must not load the package."""
    from regrow.checkpoint.merger import GRACE_SECONDS, INTERVAL_SECONDS
    from regrow.checkpoint.retention import UNFINISHED_SECONDS, Rules

    assert parse_seconds(ckpt_cli.GRACE) == GRACE_SECONDS
    assert parse_seconds(ckpt_cli.INTERVAL) == INTERVAL_SECONDS
    assert parse_seconds(ckpt_cli.UNFINISHED) == UNFINISHED_SECONDS
    assert parse_seconds(ckpt_cli.KEEP_FULL_EVERY) == Rules().keep_full_every_seconds
    assert Rules().keep_last == ckpt_cli.KEEP_LAST


def test_help_loads_nothing_slow() -> None:
    code = (
        "import sys; from regrow.cli import main as cli; codes = [cli.run([*line.split(), '--help']) for line in"
        " ('ckpt', 'merge', *(f'ckpt {name}' for name in cli.ckpt.ckpt.commands))];"
        " print({*codes}, {'torch', 'numpy', 'rich', 'fsspec', 'regrow.checkpoint.lineage'} & {*sys.modules})"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "{0} set()"
    assert cli.run(["ckpt"]) == 2

"""Goal: the command line says what it can do, quickly, and answers every mistake with one message and a code.

Method: the entry point is called in process, with a fake launcher where a run would start.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import click
import pytest

from regrow.cli import main as cli
from regrow.cli.train import KNOBS
from regrow.config import TrainConfig
from regrow.errors import ChildFailed, DataLoss, Interrupted, MemoryShort
from regrow.inputs import FORMS
from regrow.launch import local
from regrow.units import MIB


class FakeLauncher:
    """Keeps the config it was to run, and fails if asked to."""

    def __init__(self) -> None:
        self.config: TrainConfig | None = None
        self.keywords: dict[str, Any] = {}
        self.failure: BaseException | None = None

    def __call__(self, config: TrainConfig, **keywords: Any) -> dict[str, Any]:
        self.config, self.keywords = config, keywords
        if self.failure is not None:
            raise self.failure
        return {}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> FakeLauncher:
    fake = FakeLauncher()
    monkeypatch.setattr(local, "train", fake)
    monkeypatch.delenv("REGROW_DEBUG", raising=False)
    return fake


def test_every_field_is_an_option() -> None:
    options = [knob.name for knobs in KNOBS.values() for knob in knobs]
    assert len(set(options)) == len(options)
    # A script is no option of `train`: `regrow run` has it as an argument.
    assert {*options, "script"} == {field.name for field in dataclasses.fields(TrainConfig)}


def test_no_options_is_the_default_config(launcher: FakeLauncher) -> None:
    assert cli.run(["train"]) == 0
    assert launcher.config == TrainConfig()
    assert launcher.keywords["overwrite"] is False


def test_a_schema_arrives(launcher: FakeLauncher) -> None:
    assert cli.run(["train", "--data", "csv:x.csv", "--schema", "s.toml", "--model", "tiny", "--batch", "32"]) == 0
    assert launcher.config == TrainConfig(data="csv:x.csv", schema="s.toml", model="tiny", batch=32)


def test_options_arrive(launcher: FakeLauncher) -> None:
    line = (
        "train --data criteo:x.tsv --model tiny --rows-max 10 --train-rows 100 --test-rows 50 "
        "--skip-bad-lines --epochs 2 --batch 32 --mode sync --optimizer adam --learning-rate 0.5 "
        "--dense-optimizer momentum --dense-learning-rate 1 --prefetch 0 --seed 9 --servers 3 "
        "--workers 4 --device cuda:1 --threads-per-worker 2 --threads-per-server 3 --transport tcp "
        "--protect ec --k 2 --r 1 --rings 1 --flush-pushes 3 --flush-bytes 1M --commit exactly-once "
        "--sweep-bytes-per-s 2k --kill server:2@step:9 --kill coordinator@step:8 --pause server:1@step:7:5s "
        "--mtbf 20 --mtbf-roles server,worker --mtbf-shape 0.67 --mtbf-kill 1 --redo-bytes 1M "
        "--frame-bytes-max 2097153 --out there --no-digest --overwrite --quiet"
    )
    assert cli.run(line.split()) == 0
    assert launcher.config == TrainConfig(
        data="criteo:x.tsv",
        model="tiny",
        rows_max=10,
        train_rows=100,
        test_rows=50,
        skip_bad_lines=True,
        epochs=2,
        batch=32,
        mode="sync",
        optimizer="adam",
        learning_rate=0.5,
        dense_optimizer="momentum",
        dense_learning_rate=1.0,
        prefetch=0,
        seed=9,
        servers=3,
        workers=4,
        device="cuda:1",
        threads_per_worker=2,
        threads_per_server=3,
        transport="tcp",
        protection="ec",
        k=2,
        flush_pushes=3,
        flush_bytes=MIB,
        sweep_bytes_per_s=2048,
        kill=("server:2@step:9", "coordinator@step:8"),
        pause=("server:1@step:7:5s",),
        mtbf=20.0,
        mtbf_roles="server,worker",
        mtbf_shape=0.67,
        redo_bytes_max=MIB,
        frame_bytes_max=2 * MIB + 1,
        out="there",
        digest=False,
    )
    assert launcher.keywords["overwrite"] is True


@pytest.mark.parametrize("digest, code, word", [("ab", 0, "equal"), ("cd", 1, "DIFFERENT")])
def test_demo_compares(
    digest: str, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[TrainConfig] = []
    failure = {"id": 2, "step": 2, "stall_s": 0.2, "rows": 1000, "recovered_s": 0.5}

    def train(config: TrainConfig, **_: Any) -> dict[str, Any]:
        configs.append(config)
        return {"model_sha256": digest if config.kill else "ab", "failures": [failure] if config.kill else []}

    monkeypatch.setattr(local, "train", train)
    assert cli.run(["demo", "--steps", "4", "--out", "here", "--quiet"]) == code
    assert word in capsys.readouterr().out
    undisturbed, killed = configs
    assert killed == undisturbed.replace(kill=("server:2@step:2",), out="here/killed")
    assert (killed.mode, killed.protection) == ("sync", "ec")


def test_config_file(launcher: FakeLauncher, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("servers = 3\nworkers = 7\nsteps = 9\n")
    assert cli.run(["train", "--config", str(path), "--workers", "1"]) == 0
    assert launcher.config == TrainConfig(servers=3, workers=1, steps=9)


def test_a_file_spells_options_as_the_command_line_does(
    launcher: FakeLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {line.split(" = ")[0] for line in TrainConfig(steps=3, kill=("server:1@step:2",)).to_toml().splitlines()}
    flags = {knob.flag.removeprefix("--").replace("-", "_") for knobs in KNOBS.values() for knob in knobs}
    assert keys <= {*flags, "script"}
    path = tmp_path / "config.toml"
    path.write_text('protect = "ec"\nredo_bytes = 65536\n')
    assert cli.run(["train", "--config", str(path)]) == 0
    assert launcher.config == TrainConfig(protection="ec", redo_bytes_max=65536)
    assert capsys.readouterr().err == ""
    path.write_text('protection = "ec"\n')
    assert cli.run(["train", "--config", str(path)]) == 0
    assert launcher.config == TrainConfig(protection="ec")
    assert capsys.readouterr().err == f"hint: {path}: protection is spelled protect now, like the option --protect\n"
    path.write_text('protect = "raid"\n')
    assert cli.run(["train", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: protect = 'raid': must be one of: none, ec, ")
    path.write_text('protect = "ec"\nprotection = "ec"\n')
    assert cli.run(["train", "--config", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: protect and protection are one option\n")


BAD_LINES = [
    ("train --batch 0", "error: --batch 0: must be at least 1\n"),
    ("train --batch many", "error: Invalid value for '--batch': 'many' is not a valid integer.\n"),
    ("train --data x.tsv", f"error: --data x.tsv: must be {FORMS}\nhint: for a file in "),
    (
        "train --steps 5 --epochs 2",
        "error: --epochs 2: steps = 5 is given too\nhint: give only one of the two\n",
    ),
    ("train --mode snyc", "error: Invalid value for '--mode': 'snyc' is not one of 'async', 'sync'.\n"),
    ("train --modle tiny", "error: No such option"),
    ("train --groups 2", "error: No such option '--groups'"),
    (
        "train --redo-bytes 3X",
        "error: Invalid value for '--redo-bytes': '3X' is not a number of bytes",
    ),
    (
        "train --protect ec --servers 3",
        "error: --k 4: k + r = 5 members need as many servers in a ring; 3 servers in 1 ring\nhint: k = 2 fits\n",
    ),
    ("train --kill server:2", "error: --kill server:2: must be like server:2@step:100\n"),
    ("train --protect raid", "error: Invalid value for '--protect': 'raid' is not one of 'none', 'ec', 'full', "),
    ("train --config /nonexistent.toml", "error: cannot read /nonexistent.toml: No such file or directory\n"),
    ("train extra", "error: Got unexpected extra argument"),
    ("tarin", "error: No such command 'tarin'."),
    ("bench nothing", "error: Invalid value for"),
    ("bench", "error: Missing argument"),
    ("", "Usage: regrow "),
]


@pytest.mark.parametrize("line, message", BAD_LINES, ids=[bad[0] for bad in BAD_LINES])
def test_bad_usage(line: str, message: str, launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(line.split()) == 2
    output, errors = capsys.readouterr()
    assert errors.startswith(message)
    assert "Traceback" not in errors
    assert output == ""
    assert launcher.config is None


def test_an_option_that_was_renamed(launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--groups", "2"]) == 2
    assert capsys.readouterr().err.endswith("hint: it is called --rings now\n")


def list_commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All commands there are, and the group of all."""
    below = command.commands.items() if isinstance(command, click.Group) else ()
    return [path, *(found for name, each in below for found in list_commands(each, (*path, name)))]


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("path", list_commands(cli.cli), ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*path, flag]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: {' '.join(('regrow', *path))} ")


FAILURES = [
    (ChildFailed("server 2 died", hint="its log: x"), 1, "error: server 2 died\nhint: its log: x\n"),
    (MemoryShort("too large"), 2, "error: too large\n"),
    (DataLoss("gone", hint="start again"), 4, "error: gone\nhint: start again\n"),
    (Interrupted("interrupted at step 3", signal_number=2), 130, "interrupted at step 3\n"),
    (Interrupted("stopped by SIGTERM at step 3", signal_number=15), 143, "stopped by SIGTERM at step 3\n"),
    (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    (
        ZeroDivisionError("oops"),
        1,
        "error: a bug in regrow: ZeroDivisionError: oops\nhint: REGROW_DEBUG=1 shows where\n",
    ),
]


@pytest.mark.parametrize("failure, code, message", FAILURES, ids=[repr(case[0]) for case in FAILURES])
def test_failures(
    failure: BaseException,
    code: int,
    message: str,
    launcher: FakeLauncher,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launcher.failure = failure
    assert cli.run(["train"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(
    launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGROW_DEBUG", "1")
    launcher.failure = ChildFailed("server 2 died")
    assert cli.run(["train"]) == 1
    assert "Traceback" in capsys.readouterr().err
    launcher.failure = ZeroDivisionError("oops")
    with pytest.raises(ZeroDivisionError):
        cli.run(["train"])


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for heading, knobs in KNOBS.items():
        assert f"{heading}:" in text
        for knob in knobs:
            assert f"{knob.flag} " in text
    for default in ("[kaggle]", "[async]", "[64M]", "[yes]"):
        assert default in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("regrow ")


def test_help_loads_nothing_slow() -> None:
    """Torch alone takes seconds. Checked by module, not by time, so that a busy machine cannot fail it."""
    code = (
        "import sys; from regrow.cli import main as cli; codes = [cli.run([*line.split(), '--help']) for line in"
        " ('', 'train', 'bench', 'plan partial')]; print(codes, {'torch', 'numpy', 'rich', 'asyncio'} & {*sys.modules})"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[0, 0, 0, 0] set()"


def test_bench_runs_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = types.ModuleType("regrow.bench.kernels")
    module.run = lambda **keywords: calls.append(keywords) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "regrow.bench.kernels", module)
    assert cli.run(["bench", "kernels", "--quick", "--json", "x.json"]) == 3
    assert calls == [{"quick": True, "json_path": "x.json"}]


def test_bench_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "regrow.bench.accuracy", None)
    assert cli.run(["bench", "accuracy"]) == 2
    assert capsys.readouterr().err.startswith("error: bench accuracy cannot be run: ")

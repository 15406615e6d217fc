"""Goal: a script of somebody's own runs alone and under the launcher, survives what `regrow train` survives, goes on
from checkpoints, and every mistake in it is one message that says where.

Method: the example as it stands, and scripts written here, with real processes and kills. Synchronous runs end with one
digest, whatever was killed.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.storage import Storage
from regrow.errors import UserError

pytestmark = pytest.mark.live

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_deepfm.py"
SMALL = ["--samples", "5120", "--epochs", "2"]  # 20 steps of two workers
SYNC = ["--mode", "sync", "--workers", "2"]
COMMAND = [sys.executable, "-m", "regrow.cli"]


def run(*words: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, "run", *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train(out: Path, *words: str, script: tuple[str, ...] = (str(EXAMPLE), *SMALL)) -> dict[str, Any]:
    run("-q", "--out", str(out), *words, *script)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@functools.cache
def undisturbed() -> str:
    """The digest of a run that nothing happens to and nothing protects."""
    with tempfile.TemporaryDirectory() as directory:
        summary = train(Path(directory) / "run", *SYNC, "--servers", "2")
    assert summary["steps"] == 20
    assert summary["samples"] == 2 * 5120
    return str(summary["model_sha256"])


def test_alone_it_is_a_script_like_any_other() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--samples", "25600"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1])["auc"] > 0.7
    assert "leaked" not in done.stderr


@pytest.mark.parametrize(
    "kills",
    [("server:1@step:5",), ("worker:0@step:7",), ("server:2@step:4", "worker:1@step:9", "coordinator@step:6")],
    ids=["server", "worker", "one of each"],
)
def test_it_survives_and_the_model_is_the_same(tmp_path: Path, kills: tuple[str, ...]) -> None:
    chosen = [word for kill in kills for word in ("--kill", kill)]
    summary = train(tmp_path / "run", *SYNC, "--servers", "3", "--protect", "ec", "--k", "2", "--check-parity", *chosen)
    assert summary["model_sha256"] == undisturbed()
    assert summary["parity_wrong"] == 0
    assert len(summary["failures"]) == len(kills)


def test_it_falls_back_to_a_checkpoint_and_goes_on_from_one(tmp_path: Path) -> None:
    script = (str(EXAMPLE), "--samples", "20480", "--epochs", "1")  # 40 steps of two workers
    whole = train(tmp_path / "whole", *SYNC, "--servers", "2", script=script)["model_sha256"]
    saving = ("--protect", "delta", "--ckpt", str(tmp_path / "ckpt"), "--every", "4steps")
    fallen = train(tmp_path / "a", *SYNC, "--servers", "3", *saving, "--kill", "server:1@step:36", script=script)
    assert fallen["model_sha256"] == whole
    assert len(fallen["restores"]) == 1
    cut = Graph(Storage.open(str(tmp_path / "ckpt")).manifests()[0]).restorable()[0]
    where = f"{tmp_path / 'ckpt'}@{cut.id}"
    resumed = train(tmp_path / "b", *SYNC, "--servers", "4", "--resume", where, script=script)
    assert resumed["model_sha256"] == whole
    assert resumed["steps"] == 40


def test_asynchronously_every_batch_counts_once(tmp_path: Path) -> None:
    summary = train(
        tmp_path / "run",
        *("--servers", "3", "--workers", "2", "--protect", "ec", "--k", "2"),
        *("--kill", "server:0@step:5", "--kill", "worker:1@step:8"),
    )
    assert summary["steps_done"] == 40
    assert summary["samples"] == 2 * 5120
    assert summary["metrics"]["auc"] > 0.5


COUNTING = """
import torch, regrow
job = regrow.join()
name = dict(num_embeddings=60, embedding_dim=2, name="t", feature_names=["f"])
rows = job.embedding_bag_collection(
    [regrow.EmbeddingBagConfig(**name)], optimizer=regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
)
def make(n):
    return regrow.KeyedJaggedTensor(["f"], torch.arange(n, n + 20), torch.ones(20, dtype=torch.int32))
batches = [make(20 * (n % 3)) for n in range(300)]
for batch in job.loop(batches):
    job.step(rows(batch).values().sum())
print("LOST", int((100 + job.read_weights("t").round()[:, 0]).sum()))
"""


@pytest.mark.parametrize(
    ("kind", "every", "servers", "kills"),
    [
        pytest.param("partial", "10steps", 3, (1,), id="partial"),
        pytest.param("ec+partial", "1000steps", 4, (0, 2), id="ec+partial", marks=pytest.mark.slow),
    ],
)
def test_what_partial_recovery_loses_is_counted(
    tmp_path: Path, kind: str, every: str, servers: int, kills: tuple[int, ...]
) -> None:
    """Every push takes one from each of its rows, and every row is in 100 of them: what is missing at the end is what
    the summary says."""
    words = [
        "--servers",
        str(servers),
        "--protect",
        kind,
        "--ckpt",
        str(tmp_path / "ckpt"),
        "--every",
        every,
        "--k",
        "2",
    ]
    words += [word for server in kills for word in ("--kill", f"server:{server}@step:100")]
    out = tmp_path / "run"
    script = write(tmp_path, COUNTING)
    done = run("-q", "--out", str(out), "--mode", "sync", "--workers", "1", *words, script)
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["failures"]) == len(kills)
    found = summary["partial"]
    assert f"LOST {found['updates_lost']}" in done.stdout.splitlines()
    assert found["pls"] == pytest.approx(found["samples_lost"] / (300 * 20 * servers))
    assert found["saves"] > 0 if kind == "partial" else found["updates_lost"] > 0 and found["pls"] > 0
    assert summary["restores"] == []


JUDGING = """
import os, signal
from pathlib import Path
marker = Path(sys.argv[1])
labels = (torch.arange(8) % 2).float()
def predict(batch):
    if job.worker == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return model[1](model[0](batch).values()).reshape(-1), labels
for _ in range(2):
    for batch in job.loop(batches):
        job.step(loss_of(batch))
    found = job.evaluate(model, batches[:5], predict=predict, together=True)
alone = job.evaluate(model, batches[:5], predict=predict)
print("SAME" if found == alone else f"{found} {alone}")
"""


def test_workers_judge_together_and_one_may_die(tmp_path: Path) -> None:
    """What they find is what one alone finds, to the bit. The one that dies finds the first evaluation done."""
    words = ("--servers", "3", "--protect", "ec", "--k", "2")
    script = write(tmp_path, HEAD, JUDGING)
    done = run("-q", "--out", str(tmp_path / "run"), *SYNC, *words, script, str(tmp_path / "marker"))
    assert done.stdout.splitlines() == ["SAME"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [failure["role"] for failure in summary["failures"]] == ["worker"]
    assert not (tmp_path / "run" / "tallies").exists()


WITHIN = """
def predict(batch):
    return model[1](model[0](batch).values()).reshape(-1), (torch.arange(8) % 2).float()
found = []
for batch in job.loop(batches):
    if job.steps == 2:
        found.append(job.evaluate(model, batches[:5], predict=predict, together=True))
    job.step(loss_of(batch))
    if job.steps == 4:
        found.append(job.evaluate(model, batches[:5], predict=predict, together=True))
print(len(found), found[0] != found[1])
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_judge_together_before_and_behind_a_step(tmp_path: Path, mode: str) -> None:
    """Behind a synchronous step, nobody asks for the next while all judge."""
    words = ("-q", "--out", str(tmp_path / "run"), "--mode", mode, "--servers", "1", "--workers", "2")
    assert run(*words, write(tmp_path, HEAD, WITHIN)).stdout.splitlines() == ["2 True"]


PASSING = """
for batch in job.loop(batches):
    job.step(loss_of(batch))
    if job.steps == 3 and job.worker == 1:
        job.evaluate(model, batches[:5], predict=predict, together=True)
"""


def test_a_synchronous_worker_that_judges_alone_is_named(tmp_path: Path) -> None:
    """Not after an hour: the others wait for it in the next step, and it for them."""
    words = ("-q", "--out", str(tmp_path / "run"), *SYNC, "--servers", "1")
    done = run(*words, write(tmp_path, HEAD, WITHIN.partition("found")[0], PASSING), code=2)
    assert "worker 1 waits in job.evaluate(together=True) in step 3 of loop 1, after step 3" in done.stderr


KEEPING = """
import os, signal
from pathlib import Path
print("HAS", job.extra)
for batch in job.loop(batches, epochs=1000):
    job.step(loss_of(batch))
    if job.progress.step == 5:
        job.save({"best": 0.5, "steps": torch.tensor([5])})
    if job.done:
        break
    if list(Path(sys.argv[1]).rglob("manifest.json")):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_it_keeps_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    """The checkpoint that it asks for is the only one: the next would be after an hour. The worker dies when it sees
    it, everybody goes back to it, and the script finds what it kept."""
    url = str(tmp_path / "ckpt")
    script = write(tmp_path, HEAD, KEEPING)
    saving = ("--protect", "full", "--ckpt", url, "--every", "1h", "--servers", "2", "--workers", "1")
    done = run("-q", "--out", str(tmp_path / "a"), *saving, script, url)
    assert done.stdout.splitlines() == ["HAS None", "HAS {'best': 0.5, 'steps': tensor([5])}"]


NOISY = """
import os
for batch in job.loop(batches):
    noise = os.getpid() if job.worker == 1 and job.progress.step == 2 else 0
    job.step(loss_of(batch) * (1 + noise))
"""


def test_a_run_that_is_not_repeatable_says_where(tmp_path: Path) -> None:
    """The third step of worker 1 depends on its process."""
    words = ("-q", "--out", str(tmp_path / "two"), *SYNC, "--servers", "1", "--check-repeat")
    done = run(*words, write(tmp_path, HEAD, NOISY), code=1)
    assert "the two runs part at step 3, in worker 1: the loss differs" in done.stderr


# -- what a script may do, and what it may not ------------------------------------------------------------

HEAD = """
import sys, torch, regrow
from torch import nn
job = regrow.join()
tables = [regrow.EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name="t", feature_names=["f"])]
model = job.dense(nn.ModuleList([job.embedding_bag_collection(tables), nn.Linear(4, 1)]))
def make(n):
    lengths = torch.ones(8, dtype=torch.int32)
    return regrow.KeyedJaggedTensor(["f"], torch.arange(8) + n, lengths)
batches = [make(n) for n in range(12)]
def loss_of(batch):
    return model[1](model[0](batch).values()).square().mean()
"""
LOOP = "for batch in job.loop(batches):\n    job.step(loss_of(batch))\n"


def write(path: Path, *parts: str) -> str:
    script = path / "script.py"
    script.write_text("".join(parts))
    return str(script)


def fail(path: Path, *parts: str, words: tuple[str, ...] = ()) -> str:
    """What the user is told of a script that goes wrong; once, and without a traceback."""
    done = run("-q", "--out", str(path / "run"), "--servers", "2", *words, write(path, *parts), code=1)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    return done.stderr


def test_what_it_prints_is_seen_once(tmp_path: Path) -> None:
    script = write(tmp_path, HEAD, LOOP, "print('done by', sys.argv[1:])\n")
    done = run("-q", "--out", str(tmp_path / "run"), "--workers", "2", "--servers", "2", script, "--x", "1")
    assert done.stdout.splitlines() == ["done by ['--x', '1']"]


def test_what_it_leaves_to_its_end_is_done(tmp_path: Path) -> None:
    """As `python` would: functions of `atexit`, and files that nobody closed."""
    top = (
        "import atexit, sys\nleft = open('left.txt', 'w')\natexit.register(lambda: open('end.txt', 'w').write('end'))\n"
    )
    (tmp_path / "train.py").write_text(
        top + EXAMPLE.read_text().replace("    main()", "    left.write('left')\n    main()")
    )
    run("-q", "--servers", "1", "--workers", "1", "train.py", "--samples", "512", cwd=tmp_path)
    assert (tmp_path / "left.txt").read_text() == "left"
    assert (tmp_path / "end.txt").read_text() == "end"


def test_what_it_logs_is_in_the_metrics(tmp_path: Path) -> None:
    script = write(tmp_path, HEAD, LOOP, "    job.log(mine=4.5)\n")
    train(tmp_path / "run", "--servers", "2", script=(script,))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["logged"] == {"mine": 4.5}


def test_a_module_is_as_good(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "go.py").write_text(HEAD + LOOP + "print(__name__, sys.argv[1:])\n")
    done = run("-q", "--out", str(tmp_path / "run"), "--servers", "2", "-m", "mine.go", "a", cwd=tmp_path)
    assert done.stdout.splitlines() == ["__main__ ['a']"]


def test_an_exception_is_told_with_its_line(tmp_path: Path) -> None:
    said = fail(tmp_path, HEAD, "for batch in job.loop(batches):\n    {}['nothing here']\n", words=("--workers", "2"))
    assert "KeyError: 'nothing here'" in said
    assert "worker " in said
    assert "line 14: {}['nothing here']" in said


def test_mistakes_with_the_job_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    assert "did not join the run" in fail(tmp_path / "a", "print('hello')\n")
    assert "joins twice" in fail(tmp_path / "b", HEAD, "regrow.join()\n")
    assert "was left without job.step" in fail(tmp_path / "c", HEAD, "for batch in job.loop(batches): pass\n")


def test_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    assert "ended with exit code 3" in fail(tmp_path, HEAD, LOOP, "sys.exit(3)\n")


def test_tables_that_differ_between_workers(tmp_path: Path) -> None:
    script = HEAD.replace("num_embeddings=50", "num_embeddings=50 + job.worker")
    said = fail(tmp_path, script, LOOP, words=("--workers", "2"))
    assert "table 't' has rows = 5" in said


def test_before_anything_starts(tmp_path: Path) -> None:
    def refuse(*words: str) -> str:
        done = run(*words, code=2)
        return done.stderr

    assert "there is no script nowhere.py" in refuse("nowhere.py")
    assert "no script is named" in refuse()
    assert "No such option" in refuse("--batch", "3", str(EXAMPLE))
    assert "--protect partial: needs a place for checkpoints" in refuse("--protect", "partial", str(EXAMPLE))


def check_export(url: str, model: Any, path: Path) -> None:
    """What was exported has the names of the script's module, and its values."""
    from safetensors.torch import load_file

    subprocess.run([*COMMAND, "ckpt", "export", url, "--to", str(path)], check=True, capture_output=True)
    found, wanted = load_file(path), model.state_dict()
    counted = {name for name in wanted if name.endswith("num_batches_tracked")}  # whole numbers are in no table
    assert found.keys() == wanted.keys() - counted
    assert all(found[name].equal(wanted[name]) for name in found)


def test_a_checkpoint_of_a_script_is_loaded_into_a_plain_model(tmp_path: Path) -> None:
    """Rows, dense parameters and the averages of BatchNorm: what the plain model says is what the script's said. The
    names that they have in the model are known to the coordinator's successor, and to those who read publications."""
    import importlib.util

    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    import regrow.serving
    from regrow.metrics import AUC, LogLoss

    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    url = str(tmp_path / "ckpt")
    live = str(tmp_path / "live")
    words = [*SYNC, "--servers", "2", "--protect", "ec+delta", "--k", "1", "--ckpt", url, "--every", "5steps"]
    words += ["--publish", live, "--publish-every", "5steps", "--kill", "coordinator@step:8"]
    summary = train(tmp_path / "run", *words)

    class Plain(nn.Module):
        """TorchRec's names around `nn.EmbeddingBag`."""

        def __init__(self) -> None:
            super().__init__()
            bags = {f"t_{f}": nn.EmbeddingBag(example.ROWS, example.DIM, mode="sum") for f in example.FEATURES}
            self.embedding_bags = nn.ModuleDict(bags)

        def forward(self, features: regrow.KeyedJaggedTensor) -> regrow.KeyedTensor:
            ids = features.values().view(len(example.FEATURES), -1)
            pooled = [self.embedding_bags[f"t_{f}"](ids[i].unsqueeze(1)) for i, f in enumerate(example.FEATURES)]
            return regrow.KeyedTensor(example.FEATURES, [example.DIM] * len(pooled), torch.cat(pooled, 1))

    model = example.DeepFM(Plain()).eval()
    tables = regrow.load(url, model)
    check_export(url, model, tmp_path / "model.safetensors")
    with regrow.serving.Replica(live, follow=False) as replica:
        assert all(model.state_dict()[name].equal(value) for name, value in replica.read_dense().items())
        assert "deep.1.running_var" in replica.read_dense()
    other = tmp_path / "other.py"
    other.write_text(EXAMPLE.read_text().replace("nn.Linear(", "nn.Linear(1 + ", 1))
    refused = run("-q", *SYNC, "--servers", "2", "--resume", url, str(other), *SMALL, code=1, cwd=tmp_path).stderr
    assert "the model is not that of the checkpoint: " in refused
    assert {name: tuple(rows.shape) for name, rows in tables.items()} == {
        f"t_{f}": (example.ROWS, example.DIM) for f in example.FEATURES
    }
    area, loss = AUC(), LogLoss()
    test = DataLoader(example.Clicks(5_000, seed=2), batch_size=1024, collate_fn=lambda batch: batch)
    with torch.no_grad():
        for batch in test:
            logits = model(batch.features)
            area.update(batch.labels.numpy(), logits.numpy())
            loss.update(batch.labels.numpy(), logits.numpy())
    assert (area.compute(), loss.compute()) == pytest.approx((summary["auc"], summary["logloss"]), abs=1e-6)
    with pytest.raises(UserError, match="the model has no place for table 't_user'"):
        regrow.load(url, nn.Linear(2, 2))
    with pytest.raises(UserError, match="no table 'gone'"):
        regrow.load(url, model, tables={"gone": "x"})

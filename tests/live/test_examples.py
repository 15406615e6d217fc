"""The example script as a user runs it: in process, and against server processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parents[2] / "examples" / "train_click_model.py"


@pytest.mark.parametrize("options", [[], ["--servers", "3"]], ids=["in process", "server processes"])
def test_click_model_learns(options):
    run = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert losses[0] > 0.65  # a coin toss is 0.693
    assert losses[-1] < 0.3


LEFT = """
import torch, regrow
cluster = regrow.{cluster}(servers=2)
table = regrow.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t", feature_names=["f"])
collection = regrow.EmbeddingBagCollection(tables=[table], cluster=cluster)
features = regrow.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1], dtype=torch.int32))
trained, looked = collection(features), collection(features)
trained.values().sum().backward()
"""


@pytest.mark.parametrize("cluster", ["InProcessCluster", "LocalCluster"])
def test_a_script_ends_without_words(cluster):
    """Also one that leaves everything lying around: the end of the interpreter tells of no leaks."""
    code = LEFT.format(cluster=cluster)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_what_init_writes_trains_as_it_is(tmp_path):
    """Alone, and with servers, one of which dies; and what is there is not replaced."""
    command = [sys.executable, "-m", "regrow.cli"]

    def run(*words, code=0):
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    said = run(*command, "init", "mine").stdout
    assert "regrow run --config regrow.toml train.py" in said
    tmp_path /= "mine"
    alone = run(sys.executable, "train.py").stdout
    assert float(re.search(r"'auc': ([\d.]+)", alone)[1]) > 0.8
    served = run(*command, "run", "--config", "regrow.toml", "--out", "out", "--kill", "server:1@step:50", "train.py")
    assert float(re.search(r"'auc': ([\d.]+)", served.stdout)[1]) > 0.8
    assert "survived" in served.stdout + served.stderr
    refused = run(*command, "init", ".", code=2)
    assert "train.py is there already" in refused.stderr

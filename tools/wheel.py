"""A wheel, and whether it works where there are no sources: `python tools/wheel.py [--out dist] [--also PYTHON ...]`.

It is built with what is installed beside this Python, put into an environment of its own, and used there from a
directory outside of this one: what is in it, the command, the examples. That environment borrows torch and the other
dependencies from the one that runs this: nothing is downloaded.

`--also python3.13` makes one for another interpreter too, as users do: built in isolation, with its dependencies from
the package index. But without torch, which may have no small build for it: used there are the kernels and the protocol,
by the simulator and the tests that need no torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS_MAX = 900  # of one command, on a machine that has other things to do
# Files without which something in the package fails that tests in the source tree would not miss.
NEEDED = ("regrow/py.typed", "regrow/_kernels.pyi", "regrow/starter/train.py.txt", "regrow/starter/regrow.toml")
# What tests and the package need beside torch, and tests that need that too.
TESTERS = ("hypothesis>=6.100", "pytest>=8.2", "pytest-timeout>=2.3")
WITHOUT_TORCH = ("tests/unit/core", "tests/unit/store")
WITH_TORCH = (
    "tests/unit/core/test_states.py::test_the_diagrams_are_current",
    "tests/unit/store/test_shard_kernels.py::test_torch_tensors_and_read_only_arrays_are_arrays",
)
# Arguments with which each example ends soon.
EXAMPLES = {
    "train_click_model.py": [],
    "train_deepfm.py": ["--samples", "2560"],
    "delta_checkpoints.py": [],
}


def build(out: Path) -> Path:
    """The wheel, in `out`."""
    with tempfile.TemporaryDirectory() as fresh:
        options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # cmake and ninja are there
        run([sys.executable, "-m", "pip", "wheel", *options, "-w", fresh, str(ROOT)], env={**os.environ, "PATH": path})
        (made,) = Path(fresh).glob("regrow-*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, out))


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in NEEDED:
        assert needed in names, f"{wheel.name} has no {needed}"
    assert any(name.startswith("regrow/_kernels.") and name.endswith(".so") for name in names), "no extension"
    strange = [name for name in names if not name.startswith(("regrow/", "regrow-"))]
    assert not strange, f"{wheel.name} has {strange}"


def make_environment(home: Path, wheel: Path) -> Path:
    """Its Python. Whatever the wheel depends on is found behind its own packages."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)])
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def use(python: Path, where: Path) -> None:
    """From a directory that knows nothing of the sources."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["OMP_NUM_THREADS"] = "1"

    def at(*words: str, cwd: Path = where) -> str:
        return run([str(python), *words], cwd=cwd, env=env)

    found = at("-c", "import regrow, regrow._kernels as k; print(regrow.__file__, k.__file__, sep='\\n')").splitlines()
    assert all(Path(path).is_relative_to(python.parents[1]) for path in found), f"not from the wheel: {found}"
    print(run([str(python.parent / "regrow"), "--version"], cwd=where, env=env).strip())
    examples = Path(shutil.copytree(ROOT / "examples", where / "examples"))
    for name, words in EXAMPLES.items():
        at(name, *words, cwd=examples)
        print(f"examples/{name}: ok")
    command = ["-m", "regrow", "run", "-q", "--servers", "2", "--workers", "1", "--out", str(where / "run")]
    at(*command, "train_deepfm.py", *EXAMPLES["train_deepfm.py"], cwd=examples)
    print("regrow run: ok")
    at("-m", "regrow", "init", "mine")
    at("train.py", cwd=where / "mine")
    print("regrow init: ok")


def use_without_torch(interpreter: str, out: Path) -> None:
    """Builds for another interpreter, and uses the kernels and the protocol there."""
    quiet = ["--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="regrow-wheel-") as fresh:
        run([interpreter, "-m", "venv", f"{fresh}/env"])
        python = f"{fresh}/env/bin/python"
        run([python, "-m", "pip", "wheel", "--no-deps", *quiet, "-w", fresh, str(ROOT)])
        (made,) = Path(fresh).glob("regrow-*.whl")
        wheel = Path(shutil.copy(made, out))
        check_contents(wheel)
        needs = [need for need in read_dependencies() if not need.startswith("torch")]
        run([python, "-m", "pip", "install", *quiet, *needs, *TESTERS])
        run([python, "-m", "pip", "install", "--no-deps", *quiet, str(wheel)])
        print(run([python, "-m", "regrow", "sim", "--seeds", "60"], cwd=Path(fresh)).splitlines()[0])
        words = [word for test in WITH_TORCH for word in ("--deselect", test)]
        print(
            run([python, "-P", "-m", "pytest", "-p", "no:cacheprovider", *words, *WITHOUT_TORCH], cwd=ROOT).split("\n")[
                -2
            ]
        )
    print(f"{wheel} works, as far as that goes without torch")


def read_dependencies() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["project"]["dependencies"])


def run(words: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes (dist)")
    parser.add_argument("--also", nargs="*", default=[], metavar="PYTHON", help="other interpreters to make one for")
    options = parser.parse_args()
    out = options.out.resolve()
    wheel = build(out)
    check_contents(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
    with tempfile.TemporaryDirectory(prefix="regrow-wheel-") as fresh:
        where = Path(fresh) / "elsewhere"
        where.mkdir()
        use(make_environment(Path(fresh) / "env", wheel), where)
    for interpreter in options.also:
        use_without_torch(interpreter, out)
    print(f"{wheel} works")


if __name__ == "__main__":
    main()

"""A wheel, and whether it works where there are no sources: `python tools/wheel.py [--out dist]`.

It is built with what is installed beside this Python, put into an environment of its own, and used there from a
directory outside of this one: what is in it, the command, the examples. That environment borrows torch and the other
dependencies from the one that runs this: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS_MAX = 900  # of one command, on a machine that has other things to do
# Files without which something in the package fails that tests in the source tree would not miss.
NEEDED = ("regrow/py.typed", "regrow/_kernels.pyi", "regrow/starter/train.py.txt", "regrow/starter/regrow.toml")
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


def run(words: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes (dist)")
    wheel = build(parser.parse_args().out.resolve())
    check_contents(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
    with tempfile.TemporaryDirectory(prefix="regrow-wheel-") as fresh:
        where = Path(fresh) / "elsewhere"
        where.mkdir()
        use(make_environment(Path(fresh) / "env", wheel), where)
    print(f"{wheel} works")


if __name__ == "__main__":
    main()

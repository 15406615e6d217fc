"""`regrow sim` with its busiest modules compiled by mypyc, for long runs: half again as many schedules in a time.

    python tools/sim_compiled.py --seeds 300000 --jobs 2 --record FILE     # as `regrow sim`
    python tools/sim_compiled.py --compare 300                             # both ways: do they say the same?

A copy of the sources is compiled in build/sim, anew when they have changed, which takes minutes. A planted bug cannot
be put into compiled modules, and mypyc takes the types of a few others more strictly than Python does: these are left
out. What it finds is to be replayed with `regrow sim`: the sources are what users run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, BUILD = ROOT / "src" / "regrow", ROOT / "build" / "sim"
STAMP = BUILD / "stamp"
MODULES = {
    "core": "flusher flush_group flush_pace decode holder session server serving serving_async serving_sync link "
    "rebuild cut cuts wayback door answers groups pace bitmaps turns",
    "sim": "agenda world net driver checkers choices promises workers sabotage pieces machines nodes cuts",
}
# The sources that are installed for working on them must not come first.
PROGRAM = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, sys.argv.pop(1))
from regrow.cli.main import main
sys.argv[0] = "regrow"
main()
"""
COMPILED = ["-c", PROGRAM, str(BUILD), "sim"]
COMPARE_FIRST = 90_000_000  # far from seeds that anybody counts


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--compare"]:
        return compare(int(arguments[1]))
    build()
    os.execv(sys.executable, [sys.executable, *COMPILED, *arguments])


def build() -> None:
    hasher = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        hasher.update(path.read_bytes())
    if STAMP.exists() and STAMP.read_text() == hasher.hexdigest():
        return
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(SOURCES, BUILD / "regrow", ignore=shutil.ignore_patterns("__pycache__"))
    from regrow import _kernels

    shutil.copy2(_kernels.__file__, BUILD / "regrow")
    files = [f"regrow/{folder}/{name}.py" for folder, names in MODULES.items() for name in names.split()]
    print(f"compiling {len(files)} modules in {BUILD.relative_to(ROOT)}, which takes minutes ...", flush=True)
    mypyc = Path(sys.executable).parent / "mypyc"
    command = [str(mypyc), "--ignore-missing-imports", "--follow-imports=silent", *files]
    env = {**os.environ, "MYPYC_OPT_LEVEL": "2"}
    done = subprocess.run(command, cwd=BUILD, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mypyc ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    STAMP.write_text(hasher.hexdigest())


def compare(seeds: int) -> int:
    """The same schedules both ways. What is printed counts events, failures and rare paths of all of them."""
    build()
    said, seconds = [], []
    for way in (["-m", "regrow", "sim"], COMPILED):
        began = time.monotonic()
        command = [sys.executable, *way, "--seeds", str(seeds), "--seed-first", str(COMPARE_FIRST)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - began)
        first, _, rest = done.stdout.partition("\n")
        said.append((first.partition(" in ")[0], rest, done.returncode))
    print(f"{said[0][0]}: {seconds[0]:.1f} s; compiled {seconds[1]:.1f} s, {seconds[0] / seconds[1]:.2f} times as many")
    print("the same" if said[0] == said[1] else "DIFFERENT")
    return 0 if said[0] == said[1] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

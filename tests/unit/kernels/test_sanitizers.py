"""Goal: no kernel reads or writes outside its arrays, and none relies on undefined behaviour.

Method: the C++ sources and cpp/tests/driver.cpp, which runs every kernel on odd sizes in arrays of exactly
the right length, are built under the address and undefined-behaviour sanitizers and run. A planted overrun
shows that the sanitizers are awake.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CPP = Path(__file__).parents[3] / "cpp"
COMPILER = shutil.which("g++")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = [
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-psabi",
]
LEVELS = {"kernels_avx2": "-march=x86-64-v3", "kernels_avx512": "-march=x86-64-v4"}
X86 = platform.machine() in ("x86_64", "AMD64")


def compiled(source: Path, *, into: Path) -> Path:
    target = into / f"{source.stem}.o"
    isa = [LEVELS[source.stem]] if X86 and source.stem in LEVELS else []
    defines = ["-DREGROW_HAS_X86_LEVELS"] if X86 else []
    command = [str(COMPILER), *FLAGS, *SANITIZE, *isa, *defines, f"-I{CPP / 'include'}", "-c", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def run(program: Path) -> subprocess.CompletedProcess[str]:
    # The interpreter may itself run under a preloaded library; the program must not.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([program], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to build in, after the planted bug was caught in it."""
    if COMPILER is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("sanitizers")
    planted = folder / "planted.cpp"
    planted.write_text("int main(int count, char**) { int* a = new int[1]; return a[count] ? 2 : 3; }\n")
    command = [COMPILER, *SANITIZE, str(planted), "-o", str(folder / "planted")]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("g++ has no sanitizer runtime")
    assert "heap-buffer-overflow" in run(folder / "planted").stderr
    return folder


@pytest.mark.timeout(900)  # two minutes of a processor, on a machine that others use
def test_kernels_are_clean(sanitizers: Path) -> None:
    sources = [path for path in sorted((CPP / "src").glob("*.cpp")) if path.stem != "criteo"]
    # The slowest first, on as many processors as there are.
    sources = sorted([*sources, CPP / "tests" / "driver.cpp"], key=lambda path: "kernels_" not in path.stem)
    with ThreadPoolExecutor(os.cpu_count()) as builders:
        objects = list(builders.map(lambda source: compiled(source, into=sanitizers), sources))
    program = sanitizers / "driver"
    subprocess.run([str(COMPILER), *SANITIZE, *map(str, objects), "-pthread", "-o", str(program)], check=True)
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("bytes agree\n")

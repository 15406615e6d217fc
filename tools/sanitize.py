"""The fuzzer and the tests of the store, on kernels built under sanitizers: `python tools/sanitize.py`.

Everything is built in build/sanitize: the extension, and a package of links to the sources beside it, so that the
extension that is installed stays as it is. The run ends with the first read or write outside of memory that is owned.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sanitize"
PACKAGE = BUILD / "package"
TESTS = ["tests/unit/store", "tests/unit/kernels", "tests/unit/core/test_checks.py", "tests/unit/core/test_serving.py"]
# An editable installation finds its own extension before all paths are looked through.
CUSTOMIZE = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def build() -> None:
    options = ["-DREGROW_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=None"]
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD], check=True)


def link_package() -> None:
    subprocess.run(["rm", "-rf", PACKAGE], check=True)
    PACKAGE.mkdir(parents=True)
    subprocess.run(["cp", "-rs", ROOT / "src" / "regrow", PACKAGE], check=True)
    for old in (PACKAGE / "regrow").glob("_kernels*.so"):
        old.unlink()
    (library,) = BUILD.glob("_kernels*.so")
    (PACKAGE / "regrow" / library.name).symlink_to(library)
    (PACKAGE / "sitecustomize.py").write_text(CUSTOMIZE)


def find_libraries() -> str:
    names = ["libasan.so", "libubsan.so"]
    found = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True) for name in names]
    paths = [each.stdout.strip() for each in found]
    if any("/" not in path for path in paths):
        sys.exit("gcc has no sanitizer runtime here (libasan, libubsan): install it, or do without")
    return " ".join(paths)


def run(arguments: list[str]) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(PACKAGE),
        "LD_PRELOAD": find_libraries(),
        # Python keeps what it has; and errors of the address sanitizer are exit codes, as those of the other are.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    checked = "import regrow._kernels as k; assert 'sanitize' in k.__file__, k.__file__"
    subprocess.run([sys.executable, "-c", checked], env=environment, check=True, cwd=ROOT)
    if subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT).returncode:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of fuzzing (1)")
    minutes = parser.parse_args().minutes
    build()
    link_package()
    run(["tools/fuzz.py", "--minutes", str(minutes)])
    # Only what Python prints is captured: a report of a sanitizer must be seen.
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "--ignore", "tests/unit/kernels/test_sanitizers.py"]
    # The allocator of the sanitizer is not the system's: how that one is tuned cannot be seen.
    run(["-m", "pytest", *options, "-k", "not tuned_malloc", *TESTS])


if __name__ == "__main__":
    main()

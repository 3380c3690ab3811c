"""Run the whole suite under conditions other than this machine's: `make test-matrix ARGS="--rows avx2,load"`.

Each row runs the suite in a copy of the tree with one condition changed. The condition is real, not mocked: in the row
`avx2` the kernel library is built without higher levels (`--level`), and in `no-compiler` there is neither library nor
compiler, so the processes that tests start see it too. `avx2+load` combines two conditions. Arguments after `--` go to
pytest: `ARGS="--rows one-core -- tests/proto -x"`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("services", "gateway", "engine_core", "worker", "proto")
LIBRARY = "worker/pagoda_worker/kernels/cpu/libpagoda.so"
OLDEST = "oldest"  # supported versions of the libraries; see Makefile
COMPILERS = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+)(-[0-9.]+)?")
CLOSING = re.compile(r"[0-9]+ (passed|failed|error)|no tests ran")
AS_MAKE_TEST = {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": ""}
# level -> environment that limits torch's own kernels to this level
LEVELS = {
    "base": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}
FLAGS_OF = {  # in /proc/cpuinfo
    "base": "fxsr", "avx2": "avx2", "avx512": "avx512dq", "avx512bf16": "avx512_bf16", "amx": "amx_tile",
}  # fmt: skip


@dataclass
class Row:
    """How a row differs from a plain run."""

    compiler: bool = True
    needs_flag: str = ""
    python: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    load: int = 0  # number of busy-looping processes

    def __add__(self, other: Row) -> Row:
        """Combine two conditions."""
        return Row(
            compiler=self.compiler and other.compiler,
            needs_flag=self.needs_flag or other.needs_flag,
            python=self.python or other.python,
            environment=self.environment | other.environment,
            prefix=self.prefix + other.prefix,
            arguments=self.arguments + other.arguments,
            load=self.load + other.load,
        )


def _rows() -> dict[str, Row]:
    rows = {
        level: Row(needs_flag=FLAGS_OF[level], environment=environment, arguments=("--level", level))
        for level, environment in LEVELS.items()
    }
    rows["no-compiler"] = Row(compiler=False, arguments=("--level", "none"))
    rows["one-core"] = Row(prefix=("taskset", "-c", "0"))
    rows |= {f"python3.{minor}": Row(python=f"3.{minor}") for minor in (11, 12, 13)}
    rows[OLDEST] = Row(python=OLDEST)
    rows["load"] = Row(load=20)
    rows |= {f"order-{seed}": Row(arguments=("--order-seed", str(seed))) for seed in (1, 2)}
    rows["capabilities"] = Row(arguments=("--capabilities", "80,86,89,90,120", "tests/worker/kernels/triton"))
    # pytest warns that modules whose assertions it does not rewrite lose them under -O.
    rows["optimised"] = Row(environment={"PYTHONOPTIMIZE": "1"}, arguments=("-W", "ignore::pytest.PytestConfigWarning"))
    return rows


ROWS = _rows()


class Unavailable(Exception):
    """This machine lacks something the row needs."""


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of all files that git tracks or does not ignore, plus the kernel library built here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="pagoda-matrix-") as scratch:
        for name in (*filter(None, listed.stdout.decode().split("\0")), LIBRARY):
            if (ROOT / name).is_file():
                target = Path(scratch) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        yield Path(scratch)


def check_processor(row: Row) -> None:
    if row.needs_flag and row.needs_flag not in Path("/proc/cpuinfo").read_text().split():
        raise Unavailable(f"this processor has no {row.needs_flag}")


def _path_without_compilers(directory: Path, path: str) -> Path:
    directory.mkdir()
    for place in path.split(os.pathsep):
        for entry in sorted(Path(place).iterdir()) if Path(place).is_dir() else []:
            link = directory / entry.name
            if not COMPILERS.fullmatch(entry.name) and not link.is_symlink():
                link.symlink_to(entry)
    return directory


def interpreter(version: str) -> str:
    """The Python of a virtual environment with this version, or with the `OLDEST` libraries, that has the tests'
    dependencies; created next to the usual environment on first use."""
    if version in ("", f"{sys.version_info.major}.{sys.version_info.minor}"):
        return sys.executable
    venv = ROOT / f".venv-{version}"
    if not (venv / ".installed-dev").exists():
        words = [] if version == OLDEST else [f"VENV={venv.name}", f"PYTHON={_find_python(version)}"]
        if subprocess.run(["make", f"{venv.name}/.installed-dev", *words], cwd=ROOT, check=False).returncode != 0:
            raise Unavailable(f"{venv.name} cannot be made (see above)")
    return str(venv / "bin/python")


def _find_python(version: str) -> str:
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
        return found
    pyenv = shutil.which("pyenv") or str(Path.home() / ".pyenv/bin/pyenv")
    if Path(pyenv).exists():
        root = Path(subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip())
        if installed := sorted(root.glob(f"versions/{version}.*/bin/python{version}")):
            return str(installed[-1])
    raise Unavailable(f"no Python {version} on PATH, nor one of pyenv's")


@contextlib.contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def run_row(row: Row, words: list[str], log: Path) -> str:
    """Run the suite with its output in `log`; return pytest's closing line, or the last line if there is none."""
    environment = {**os.environ, **AS_MAKE_TEST, "CI": "true", **row.environment}
    with copied_tree() as tree:
        check_processor(row)
        python = interpreter(row.python)
        if not row.compiler:
            environment["PATH"] = str(_path_without_compilers(tree / ".path", environment["PATH"]))
        environment["PYTHONPATH"] = os.pathsep.join(str(tree / package) for package in (*PACKAGES, "."))
        command = [*row.prefix, python, "-m", "pytest", "-p", "no:cacheprovider", *row.arguments, *words]
        with busy_machine(row.load), log.open("w") as told:
            done = subprocess.run(command, cwd=tree, env=environment, stdout=told, stderr=told, check=False)
    lines = log.read_text().splitlines() or ["nothing was said"]
    closing = next(filter(CLOSING.search, reversed(lines)), lines[-1]).strip("= ")
    if done.returncode == 0:
        return closing
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print(*(failed or lines[-30:]), f"the rest is in {log}", sep="\n", flush=True)
    return f"FAILED: {closing}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="rows, separated by commas; a+b is both at once")
    parser.add_argument("--logs", type=Path, help="a directory for what the rows say [one of the system's]")
    parser.add_argument("--list", action="store_true", help="name the rows")
    parser.add_argument("pytest", nargs="*", default=["-q", "-n", "2"], help="words for pytest [-q -n 2]")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return 0
    names = arguments.rows.split(",")
    if unknown := {part for name in names for part in name.split("+")} - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    failed = False
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="pagoda-rows-"))
    logs.mkdir(parents=True, exist_ok=True)
    for name in names:
        began = time.monotonic()
        try:
            result = run_row(
                sum((ROWS[part] for part in name.split("+")), Row()), arguments.pytest, logs / f"{name}.log"
            )
        except Unavailable as error:
            result = f"not here: {error}"
        failed = failed or result.startswith("FAILED")
        print(f"{name:24} {time.monotonic() - began:6.0f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

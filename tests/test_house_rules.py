"""Checks over the whole tree what a reviewer would otherwise have to repeat in every review."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("services/pagoda", "gateway", "engine_core", "worker", "proto")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")

FILE_LINES, TEST_FILE_LINES = 400, 600
FUNCTION_LINES = 45
LONGER_FILES: dict[str, int] = {}  # path -> its own limit, for a longer file that is a single idea
LONGER_FUNCTIONS = {  # path and name -> its own limit: a GPU kernel is one function
    "worker/pagoda_worker/kernels/triton/experts.py product_kernel": 52,
    "worker/pagoda_worker/kernels/triton/report.py report_kernel": 46,
    "worker/pagoda_worker/kernels/triton/sampling.py prepare_kernel": 55,
}

ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv"}
READS_THE_ENVIRONMENT = {
    "services/pagoda/settings/resolving.py",
    "worker/pagoda_worker/library_choice.py",  # variables of other libraries, for which there is no API
}


def python_files(*places: str) -> list[Path]:
    found = (path for place in places for path in (ROOT / place).rglob("*.py"))
    return sorted(path for path in found if not GENERATED.search(path.name))


def product_files() -> list[Path]:
    return python_files(*PACKAGES)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of the file's syntax tree, cached: parsing and walking it costs more than all checks of its nodes."""
    return tuple(ast.walk(ast.parse(source(path))))


@pytest.fixture(scope="module", autouse=True)
def trees_are_dropped() -> Iterator[None]:
    """Half a million cached nodes would slow every garbage collection in the tests of other modules."""
    yield
    nodes.cache_clear()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        rest = dotted(node.value)
        return f"{rest}.{node.attr}" if rest else ""
    return ""


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_files_stay_of_a_size_to_be_read_at_once() -> None:
    ceilings = dict.fromkeys(product_files(), FILE_LINES) | dict.fromkeys(python_files("tests"), TEST_FILE_LINES)
    too_long = {
        name(path): lines
        for path, ceiling in ceilings.items()
        if (lines := len(source(path).splitlines())) > LONGER_FILES.get(name(path), ceiling)
    }
    assert not too_long


def test_functions_fit_on_a_screen() -> None:
    too_long = {}
    for path in product_files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function, lines = f"{name(path)} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGER_FUNCTIONS.get(function, FUNCTION_LINES):
                    too_long[function] = lines
    assert not too_long


def test_only_the_settings_read_the_environment() -> None:
    found = []
    for path in product_files():
        if name(path) in READS_THE_ENVIRONMENT:
            continue
        for node in nodes(path):
            if dotted(node) in ENVIRONMENT or ENVIRONMENT & set(imported(node)):
                found.append(f"{name(path)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found


def test_no_cancellation_is_lost() -> None:
    """Before Python 3.12, wait_for swallows a cancellation that arrives when its awaitable is done. asyncio.timeout
    does not."""
    found = [name(path) for path in product_files() if "asyncio.wait_for" in source(path)]
    assert not found


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    found = [
        f"{name(path)}:{number}"
        for path in product_files()
        for number, line in enumerate(source(path).splitlines(), 1)
        if later.search(line)
    ]
    assert not found


HEAVY = ("torch", "transformers", "triton", "numpy")
# torch imports sympy, a fifth of a worker's start, as soon as an operation that it implements in Python is used.
FIRST_TOKEN = """
import pagoda.commands.worker, pagoda_worker.process.loop
from pagoda.tools.checkpoints import locate
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.startup import load_runner
load_runner(WorkerConfig(model=str(locate("", "")), kv_cache_gib=0.01), lambda done, of: None)
"""


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has after running `code`."""
    program = f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import pagoda", (*HEAVY, "fastapi", "grpc", "zmq", "tokenizers", "yaml")),
        ("import pagoda.cli; pagoda.cli.parser_of('')", (*HEAVY, "fastapi", "grpc", "zmq", "tokenizers")),
        ("import pagoda.commands.gateway, pagoda_gateway.server", (*HEAVY, "zmq")),
        ("import pagoda.commands.engine_core, pagoda_engine_core.server", (*HEAVY, "fastapi", "tokenizers", "jinja2")),
        (FIRST_TOKEN, ("fastapi", "starlette", "tokenizers", "jinja2", "pydantic", "sympy", "transformers")),
        ("import pagoda.commands.serve", (*HEAVY, "fastapi", "grpc", "zmq", "tokenizers")),
    ],
)
def test_a_process_loads_only_what_its_tier_needs(code: str, forbidden: tuple[str, ...]) -> None:
    assert not loaded_by(code) & set(forbidden)


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=name)
def test_python_in_documents_compiles(path: Path) -> None:
    for number, block in enumerate(code_blocks(path.read_text(encoding="utf-8")), 1):
        compile(block, f"{name(path)}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_a_code_block_is_recognised() -> None:
    assert code_blocks("text\n```python\nx = 1\n```\n```bash\nls\n```\n") == ["x = 1\n"]


ROOM_MODULES = 14


def rooms() -> dict[Path, list[Path]]:
    """Directory -> its modules."""
    found: dict[Path, list[Path]] = {}
    for path in product_files():
        found.setdefault(path.parent, []).append(path)
    return found


def test_a_room_holds_what_one_can_keep_in_mind() -> None:
    crowded = {name(room): len(modules) - 1 for room, modules in rooms().items() if len(modules) - 1 > ROOM_MODULES}
    assert not crowded


def test_every_room_says_in_a_sentence_what_it_is_for() -> None:
    untold = [name(room) for room in rooms() if not _docstring(room / "__init__.py")]
    assert set(untold) <= {"proto/pagoda_proto/engine", "proto/pagoda_proto/engine/v1"}  # generated


def _docstring(path: Path) -> str:
    if not path.exists():
        return ""
    (module,) = (node for node in nodes(path) if isinstance(node, ast.Module))
    return ast.get_docstring(module) or ""


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    top = {package: (ROOT / directory) for package, directory in (("services", "services/pagoda"),)}
    top |= {tier: ROOT / tier / f"pagoda_{tier}" for tier in ("gateway", "engine_core", "worker")}
    missing = [
        f"{tier}/{room.name}/"
        for tier, package in top.items()
        for room in rooms()
        if room.parent == package and f"`{tier}/{room.name}/`" not in text
    ]
    assert not missing


@pytest.mark.parametrize("document", ["docs/architecture.md", "docs/security.md", "CONTRIBUTING.md"])
def test_modules_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    known = [name(path) for path in python_files(*PACKAGES, "tests", "bench")]
    named = set(re.findall(r"`([\w./]+\.py)`", text))
    assert named
    unknown = {
        module for module in named if not any(f"/{path}".endswith(f"/{module.split('.../')[-1]}") for path in known)
    }
    assert not unknown

"""The house inspects itself: which way imports may point, what nobody may do, and what every file must have.

Each rule is a function that lists what breaks it, with file and line; each is also shown a small text that breaks it,
so that a rule that can find nothing is found out.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "scheduler", "workers", "bench")
LINES_MAX = 440  # about 400 and a tenth: past it there is a second noun to be found

# Who may import what of headway. A name ending in a dot stands for all below it.
ARROWS = {
    "policies": ("headway.policies.",),
    "scheduler": ("headway.policies.", "headway.scheduler.", "headway.__version__."),
    "workers": (
        "headway.workers.",
        *(
            f"headway.scheduler.{name}."
            for name in (
                "wire",
                "params",
                "link",
                "errors",
                "clock",
                "spec",
                "values",
                "keepalive",
                "imports",
                "profile",
            )
        ),
        "headway.scheduler.latency.",  # the cost model is pure, and learned on both sides of the link
    ),
}
LIGHT = ("headway", "headway.scheduler.client", "headway.scheduler.core", "headway.scheduler.serve", "headway.cli.app")
HEAVY = ("torch", "transformers", "safetensors", "gguf", "numpy")

CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"}
DATES = {"now", "utcnow", "today"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNFINISHED = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")))
REGISTRIES = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + "js", r"download\.py" + "torch")))


def python_files(*folders: str) -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def all_python() -> list[Path]:
    own = [
        path
        for path in python_files("src/headway")
        if not set(path.relative_to(ROOT / "src/headway").parts) & set(FOLDERS)
    ]
    return python_files(*FOLDERS, "tests") + own


def all_text() -> list[Path]:
    """Files that are committed, or could be."""
    paths = [ROOT / name for name in git("ls-files", "-z", "-co", "--exclude-standard").split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def git(*arguments: str) -> str:
    """What git says of this checkout, whoever owns it; a tree without git is not inspected."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.check_output(["git", "-c", "safe.directory=*", *arguments], cwd=ROOT, text=True)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def found(paths: list[Path], rule: Callable[[ast.AST], Iterator[str]]) -> list[str]:
    """Every breach of a rule, which looks at one node at a time."""
    return [
        f"{where(path, getattr(node, 'lineno', 1))}: {text}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        for text in rule(node)
    ]


# ---------------------------------------------------------------- arrows


def imported(node: ast.AST) -> list[str]:
    """The full names an import brings in; `from a import b` brings in a.b, whether a module or not."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def wrong_arrows(folder: str) -> Callable[[ast.AST], Iterator[str]]:
    def rule(node: ast.AST) -> Iterator[str]:
        for name in imported(node):
            if name.startswith("."):
                yield f"a relative import ({name}); write the whole name"
            if (name + ".").startswith("headway.") and not (name + ".").startswith(ARROWS[folder]):
                yield f"{folder} must not import {name}"

    return rule


@pytest.mark.parametrize("folder", ARROWS)
def test_arrows(folder: str) -> None:
    assert found(python_files(folder), wrong_arrows(folder)) == []


@pytest.mark.parametrize(
    ("folder", "text", "breaks"),
    [
        ("policies", "from headway.policies.views import Wait", False),
        ("policies", "from headway.scheduler.clock import NS_PER_MS", True),
        ("policies", "import headway", True),
        ("scheduler", "from headway.policies import views", False),
        ("scheduler", "from headway.workers.engine import Engine", True),
        ("scheduler", "def f():\n    import headway.bench.demo", True),
        ("scheduler", "from . import wire", True),
        ("scheduler", "from headway import cli", True),
        ("workers", "from headway.scheduler import clock, link", False),
        ("workers", "from headway.scheduler import core", True),
        ("workers", "from headway.scheduler.linker import x", True),
        ("workers", "from headway.policies import views", True),
    ],
)
def test_arrows_are_seen(tmp_path: Path, folder: str, text: str, breaks: bool) -> None:
    assert bool(found([written(tmp_path, text)], wrong_arrows(folder))) == breaks


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("module", LIGHT)
def test_the_base_loads_no_model_library(module: str) -> None:
    if module != "headway" and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there")
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ---------------------------------------------------------------- what nobody may do


def reads_clock(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "time":
        yield from (f"imports time.{alias.name}" for alias in node.names if alias.name.removesuffix("_ns") in CLOCKS)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    name, of = node.func.attr, ast.unparse(node.func.value)
    if of == "time" and name.removesuffix("_ns") in CLOCKS:
        yield f"reads a clock: time.{name}"
    if of.split(".")[-1] in ("datetime", "date") and name in DATES:
        yield f"reads a clock: {of}.{name}"
    if name == "current_time" or (name == "time" and "loop" in of):
        yield f"reads a clock: {of}.{name}"


def is_unsafe(node: ast.AST) -> Iterator[str]:
    yield from (f"imports {name}" for name in imported(node) if name.split(".")[0] in UNSAFE_MODULES)
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name in UNSAFE_CALLS:
        yield f"calls {name}"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "calls torch.load without weights_only=True"
    if keywords.get("shell") == "True" or name == "os.system":
        yield f"calls a shell: {name}"


def sleeps(node: ast.AST) -> Iterator[str]:
    """sleep(0) is no sleep: it lets others run."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] != "sleep":
        return
    if [ast.unparse(argument) for argument in node.args] != ["0"]:
        yield f"sleeps: {ast.unparse(node)}"


def test_only_clock_reads_a_clock() -> None:
    """bench/start.py runs before headway is installed, and tells a person how long a step took."""
    exempt = {ROOT / "scheduler/clock.py", ROOT / "bench/start.py"}
    assert found([path for path in python_files(*FOLDERS) if path not in exempt], reads_clock) == []


def test_nothing_runs_what_it_is_sent() -> None:
    """A test may run the documentation's own examples."""
    assert found([path for path in all_python() if ROOT / "tests" not in path.parents], is_unsafe) == []


def test_tests_do_not_sleep() -> None:
    assert found(python_files("tests"), sleeps) == []


@pytest.mark.parametrize(
    ("rule", "text", "breaks"),
    [
        (reads_clock, "import time\ntime.monotonic_ns()", True),
        (reads_clock, "from time import perf_counter", True),
        (reads_clock, "import datetime\ndatetime.datetime.now()", True),
        (reads_clock, "asyncio.get_running_loop().time()", True),
        (reads_clock, "anyio.current_time()", True),
        (reads_clock, "clock.now_ns()\ntime.sleep(1)\nrow.time()", False),
        (is_unsafe, "import pickle", True),
        (is_unsafe, "from dill import loads", True),
        (is_unsafe, "eval('1')", True),
        (is_unsafe, "torch.load(path)", True),
        (is_unsafe, "subprocess.run('a', shell=True)", True),
        (is_unsafe, "model.eval()\ntorch.load(path, weights_only=True)\nre.compile('a')", False),
        (sleeps, "time.sleep(0.1)", True),
        (sleeps, "async def f():\n    await anyio.sleep(1)", True),
        (sleeps, "async def f():\n    await anyio.sleep(0)", False),
    ],
)
def test_breaches_are_seen(tmp_path: Path, rule: Callable[[ast.AST], Iterator[str]], text: str, breaks: bool) -> None:
    assert bool(found([written(tmp_path, text)], rule)) == breaks


@pytest.mark.parametrize("words", [UNFINISHED, REGISTRIES], ids=["unfinished", "registries"])
def test_words_that_do_not_belong_here(words: re.Pattern[str]) -> None:
    breaches = []
    for path in all_text():
        text = path.read_bytes().decode(errors="ignore")
        breaches += [where(path, text.count("\n", 0, match.start()) + 1) for match in words.finditer(text)]
    assert breaches == []


# ---------------------------------------------------------------- what every file must have


def test_files_open_with_their_law() -> None:
    texts = {path: path.read_text() for path in all_python()}
    assert [
        where(path, 1) for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ] == []


def test_files_are_short() -> None:
    lengths = {path: path.read_text().count("\n") for path in all_python()}
    assert [
        f"{where(path, count)}: {LINES_MAX} are enough" for path, count in lengths.items() if count > LINES_MAX
    ] == []


def test_the_package_is_links_into_the_house() -> None:
    package = ROOT / "src" / "headway"
    assert {name: os.readlink(package / name) for name in FOLDERS} == {name: f"../../{name}" for name in FOLDERS}
    listed = git("ls-files", "-s", "src/headway").splitlines()
    modes = {line.split("\t")[1].removeprefix("src/headway/"): line.split()[0] for line in listed}
    assert {name: modes.get(name) for name in FOLDERS} == dict.fromkeys(FOLDERS, "120000")
    assert (package / "py.typed").is_file()


def test_a_wheel_holds_every_file(tmp_path: Path) -> None:
    """Built offline, from a copy, because setuptools leaves its working files in the tree it builds."""
    pytest.importorskip("setuptools.build_meta")
    tree, out = tmp_path / "tree", tmp_path / "out"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", *FOLDERS):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    [wheel] = out.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"headway/{path.relative_to(ROOT).as_posix()}" for path in python_files(*FOLDERS)} | {"headway/py.typed"}
    wanted |= {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/headway/cli").glob("*.py")}
    assert wanted - inside == set()

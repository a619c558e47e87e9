"""C that is compiled on the machine it runs on, for its CPU: once, into the cache folder, then loaded with ctypes.

The file is part of the package, never of a request. Who wants it must do without where there is no compiler.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

from headway.workers.packaged import cache_root, once

FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
LINK = ("-std=gnu11", "-shared", "-fPIC")
COMPILE_S_MAX = 120.0


class CannotCompileError(RuntimeError):
    """There is no library; the text says why, and what to do."""


@cache
def library(source: Path) -> ctypes.CDLL:
    """`source` as a library. Raises CannotCompileError. `CC` names another compiler than `cc`."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    program = shutil.which(compiler[0])
    if program is None:
        raise CannotCompileError(f"there is no C compiler ({compiler[0]}); install gcc 12 or clang, or set CC")
    command = [program, *compiler[1:], *FLAGS, *LINK]
    mark = hashlib.sha256("\0".join([source.read_text(), *command, _cpu()]).encode()).hexdigest()[:16]
    try:
        folder = once(cache_root() / f"{source.stem}-{mark}", lambda into: _compile(command, source, into))
        return ctypes.CDLL(str(folder / f"{source.stem}.so"))
    except OSError as error:
        raise CannotCompileError(f"{source.name} cannot be compiled or loaded: {error}") from error


def _compile(command: list[str], source: Path, folder: Path) -> None:
    made = folder / f"{source.stem}.so"
    try:
        done = subprocess.run(
            [*command, "-o", str(made), str(source), "-lm"], capture_output=True, text=True, timeout=COMPILE_S_MAX
        )
    except subprocess.TimeoutExpired as error:
        raise CannotCompileError(f"{command[0]} did not end within {COMPILE_S_MAX:.0f} s") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise CannotCompileError(f"{command[0]} does not compile {source.name}: {first}")


def _cpu() -> str:
    """What `-march=native` looks at: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())

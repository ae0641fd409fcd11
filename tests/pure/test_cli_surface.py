"""Verbs, options and exit codes that programs and habits rely on: a change here is a change for users."""

import subprocess
import sys

import typer.main

from zero3d.cli.main import app
from zero3d.cli.signals import INTERRUPTED, exit_code

SURFACE = {
    "zero3d": ["--version", "--install-completion", "--show-completion"],
    "train": [
        "CONFIG",
        "-n/--ranks",
        "--set",
        "--trace",
        "--trace-steps",
        "--resume",
        "--allow-missing",
        "--json",
        "--allow-code",
        "--debug",
    ],
    "export": ["CHECKPOINT", "OUT", "--format", "--dtype", "--max-shard-size", "--json"],
    "calibrate": ["--out", "-n/--ranks", "--seconds", "--json", "--debug"],
    "dryrun": [
        "CONFIG",
        "-n/--world",
        "--rank",
        "--micro-batches",
        "--model",
        "--vocabulary",
        "--out",
        "--set",
        "--json",
        "--allow-code",
        "--debug",
    ],
    "plan": [
        "--model",
        "--devices",
        "--device",
        "--per-node",
        "--global-batch",
        "--sequence",
        "--host-memory",
        "--out",
        "--top",
        "--json",
        "--allow-code",
    ],
    "memory": [
        "--params",
        "--dp/--devices/--world",
        "--k",
        "--weights",
        "--gradients",
        "--level",
        "--offload",
        "--json",
    ],
    "report": ["RUN", "--out", "--json"],
    "top": ["RUN", "--once", "--json"],
    "show": [],
    "show checkpoint": ["PATH", "--verify", "--json"],
    "show layout": ["CONFIG", "-n/--ranks", "--set", "--json", "--allow-code"],
    "show schedule": ["--schedule", "--stages", "--micro-batches", "--ranks", "--picture", "--json"],
    "convert-config": ["JSON", "--out", "-n/--ranks", "--set", "--json"],
    "doctor": ["--check", "--on-cpu", "--json", "--debug"],
    "verify": ["CONFIG", "-n/--ranks", "--steps", "--set", "--json", "--allow-code", "--debug"],
}


def test_verbs_and_options() -> None:
    group = typer.main.get_command(app)
    found = {"zero3d": _options(group)}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        found[name] = _options(command)
        found |= {f"{name} {below}": _options(one) for below, one in getattr(command, "commands", {}).items()}
    assert found == SURFACE


def _options(command: object) -> list[str]:
    parameters = command.params  # type: ignore[attr-defined]
    names = ["/".join(one.opts) if one.opts[0].startswith("-") else one.metavar for one in parameters]
    return [name for name in names if not name.endswith("--help")]


def test_interrupted_leaves_with_130() -> None:
    assert INTERRUPTED == 130 == exit_code("SIGINT", saved=True) == exit_code("SIGINT", saved=False)
    assert exit_code("SIGTERM", saved=True) == 143 and exit_code("SIGHUP", saved=True) == 129
    assert exit_code("SIGUSR1", saved=True) == 0 and exit_code("SIGUSR1", saved=False) == 138


def test_help_and_version_answer_without_torch() -> None:
    for words in (["--help"], ["train", "--help"], ["verify", "--help"], ["--version"]):
        code = (
            f"import sys; sys.argv[1:] = {words!r}\n"
            "from zero3d.cli.main import entry\n"
            "try: entry()\n"
            "finally: assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "zero3d" in done.stdout


def test_a_verb_that_does_not_exist_leaves_with_2() -> None:
    done = subprocess.run([sys.executable, "-m", "zero3d", "trian"], capture_output=True, text=True)
    assert done.returncode == 2 and "train" in done.stderr

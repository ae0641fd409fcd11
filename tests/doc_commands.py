"""Runs `zero3d ...` lines of the documentation in forked processes: the command as it is, without the seconds that a
fresh interpreter takes to load torch, and on a small model.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from zero3d.cli import launch
from zero3d.cli.main import entry
from zero3d.planner.hardware import PRESETS

ROOT = Path(__file__).parents[1]
LOADED = (
    *("torch._dynamo", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"),
    *("torch.utils.tensorboard", "zero3d.train", "zero3d.engine", "zero3d.comparison", "zero3d.dryrun.run"),
)
"""What each command would load anew is loaded once, before any fork."""
for _name in LOADED:
    import_module(_name)
SMALLER = [
    (r"^width = \d+", "width = 32"),
    (r"^layers = \d+", "layers = 4"),
    (r"^sequence_length = \d+", "sequence_length = 32"),
    (r"^source = .*", 'source = "texts"'),
    (r"^log_every = \d+", "log_every = 1"),
]
"""What becomes of the examples: the same keys, a small model, a short text."""
SHORTER = [
    (r"llama3-\w+", "gpt2"),
    (r"--devices 512|--devices 8", "--devices 2"),
    (r"--world \d+", "--world 4"),
    (r"--rank 37", "--rank 3"),
    (r"-n 64", "-n 8"),
    (r"zero3d calibrate", "zero3d calibrate --seconds 0.5"),
]
"""What becomes of lines that would take long: the same options, smaller numbers."""
CONFIG = """
[run]
out = "runs/run"
steps = 40
[model]
width = 32
layers = 2
heads = 2
[data]
source = "texts"
sequence_length = 32
global_batch = 8
"""
MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 32), nn.Linear(32, vocabulary)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

def build(vocabulary):
    return Net(vocabulary)
"""
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(500))


def fill(folder: Path, files: Mapping[str, str], *, smaller: bool = True) -> None:
    """What the pages take as given: the examples, and a reader's own files."""
    (folder / "examples").mkdir()
    for file in (ROOT / "examples").glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for pattern, value in SMALLER if smaller else []:
            text = re.sub(pattern, value, text, flags=re.MULTILINE)
        (folder / "examples" / file.name).write_text(text)
    (folder / "texts").mkdir()
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "texts" / "text.py").write_text(TEXT)
    for name in ("big.toml", "mine.toml", "plan.toml"):
        (folder / name).write_text(CONFIG)
    (folder / "my").mkdir()
    (folder / "my" / "module.py").write_text(MODULE)
    (folder / "profile.json").write_text(PRESETS["CPU"].to_json())
    for name, text in files.items():
        (folder / name).write_text(text)


def shortened(line: str, home: Path, steps: int) -> list[str]:
    """The words of a command; a training goes on for so many steps."""
    line = re.sub(r"(?<= )~(?=/)", str(home), line)  # as a shell does
    for pattern, value in SHORTER:
        line = re.sub(pattern, value, line)
    line = re.sub(r" --set run\.stop_after=\d+", "", line)
    words = shlex.split(line)[1:]
    return [*words, "--set", f"run.stop_after={steps}"] if words[0] == "train" else words


def run(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """`zero3d WORDS` in `folder` -> its exit code, stdout and stderr."""
    streams = [folder / "stdout", folder / "stderr"]
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ |= {"HOME": str(folder), "COLUMNS": "100"}
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        launch.run_ranks = _forked_ranks
        _command(words)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), *(stream.read_text(encoding="utf-8") for stream in streams)


def _command(words: Sequence[str]) -> None:
    """Becomes the command; does not return."""
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(os.dup(number), mode) for number, mode in enumerate("rww"))
    sys.argv = ["zero3d", *words]
    sys.path.insert(0, os.getcwd())
    code: Any = 1
    try:
        entry()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forked_ranks(arguments: Sequence[str], ranks: int, environment: Mapping[str, str], *, debug: bool) -> None:
    """In the place of `launch.run_ranks`, which starts an interpreter for each rank."""
    with launch._store() as port:
        pids = []
        for rank in range(ranks):
            mine = launch.rank_environment(rank, ranks, port, environment, debug=debug)
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ.clear()
                os.environ |= {**mine, "OMP_NUM_THREADS": "1"}
                _command(arguments)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), codes

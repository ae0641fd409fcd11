"""A user's folder with a small configuration and a text, and the command run in it."""

import subprocess
import sys
from pathlib import Path

ZERO3D = [sys.executable, "-m", "zero3d"]
TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400))
CONFIG = """
[run]
name = "tiny"
out = "out"
steps = 4
[model]
width = 32
layers = 2
heads = 2
[data]
source = "text.py"
sequence_length = 32
global_batch = 4
[parallel]
dp = 2
"""


def fill(folder: Path) -> Path:
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "text.py").write_text(TEXT)
    return folder


def zero3d(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*ZERO3D, *words], cwd=folder, capture_output=True, text=True, timeout=120)

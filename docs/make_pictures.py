"""Draws the pictures of the concepts, each by a command of zero3d; run it after what they show has changed.

Usage: python docs/make_pictures.py [NAME ...]

Schedules and timelines are drawn by the command itself. What it prints is drawn as a terminal's window by rich, without
the fonts from elsewhere that rich would name.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
ZERO3D = [sys.executable, "-m", "zero3d"]

SCREENS = {
    "zero-levels": ("memory --params 7.5B --dp 64", 80, "Bytes of", "Model states"),
    "layout-dp": ("show layout examples/demo.toml --set parallel.dp=4 --set zero.level=0", 80, "4 ranks", "Every rank"),
    "layout-tp": ("show layout examples/demo.toml --set parallel.tp=2", 104, "What tensor", "Who holds"),
    "layout-3d": ("show layout examples/3d.toml", 80, "8 ranks", "What tensor"),
    "activations-kept": ("dryrun examples/demo.toml --rank 0", 60, "Peak of", "Sent in"),
    "activations-again": ("dryrun examples/demo.toml --rank 0 --set recompute.mode=block", 60, "Peak of", "Sent in"),
}
"""Picture -> command, columns, and the starts of the first line shown and of the first line left out."""
SCHEDULES = {
    "gpipe": "--schedule gpipe --stages 4 --micro-batches 8",
    "pipeline": "--schedule 1f1b --stages 4 --micro-batches 8",
    "interleaved": "--schedule interleaved --stages 8 --ranks 4 --micro-batches 8",
    "zbv": "--schedule zbv --stages 8 --ranks 4 --micro-batches 8",
}
TIMELINES = {"offload": "train examples/offload.toml --trace --set run.stop_after=6"}

BACKGROUND, INK = (250, 250, 250), (40, 40, 40)
NORMAL = [(0, 0, 0), (180, 30, 40), (20, 120, 60), (150, 100, 0), (40, 80, 180), (130, 50, 150), (0, 115, 135)]
THEME = TerminalTheme(BACKGROUND, INK, [*NORMAL, (90, 90, 90)], [*NORMAL, (60, 60, 60)])
WINDOW = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="100%" height="100%" rx="6" fill="#fafafa"/>
<g transform="translate(9, 9)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own window without its title, its buttons and its fonts."""


def run(words: str, folder: Path, columns: int = 100) -> str:
    """What `zero3d WORDS` prints in colours, in a folder that has the examples."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(columns), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*ZERO3D, *words.split()], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def screen(name: str, folder: Path) -> str:
    words, columns, first, last = SCREENS[name]
    lines = run(words, folder, columns).splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in lines]
    start = next(number for number, line in enumerate(plain) if line.startswith(first))
    end = next(number for number, line in enumerate(plain) if number > start and line.startswith(last))
    shown = "\n".join(lines[start:end]).rstrip()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, file=nowhere, width=columns, force_terminal=True, color_system="standard")
        console.print(Text(f"$ zero3d {words}\n", style="bold"), Text.from_ansi(shown), sep="\n")
        drawn = console.export_svg(title=name, theme=THEME, code_format=WINDOW, unique_id=name)
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def main(wanted: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(ROOT / "examples", folder / "examples")
        for name in wanted or [*SCREENS, *SCHEDULES, *TIMELINES]:
            picture = IMAGES / f"{name}.svg"
            if name in SCREENS:
                picture.write_text(screen(name, folder), encoding="utf-8")
            elif name in SCHEDULES:
                run(f"show schedule {SCHEDULES[name]} --picture {picture}", folder)
            else:
                run(TIMELINES[name], folder)
                shutil.copy(folder / "runs" / name / "timeline.svg", picture)
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])

"""All benchmarks as one: runs them row by row, prints each as it comes, and writes RESULTS.md and results.svg.

    make bench         about 20 minutes: a model of 10 million parameters, and the rows of 88 million that matter most
    make bench-full    everything, of both sizes

    python benchmarks/bench.py [--full] [--only step tensor ...] [--rows "level 1, small" ...] [--rounds 8]

Each row is one run of one of the scripts beside this one, in which all contenders take turns; see there for what they
are. A row is void where losses disagree. DeepSpeed takes part where it is installed (`make bench-install`). With
--only and --rows, all other rows stay as they were measured before.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
PICTURE = FOLDER / "results.svg"
RUNS = FOLDER.parent / "runs" / "bench"
KEPT = RUNS / "rows.json"
HOST_ADAM = {"zero3d/fused_casts": 1 / 1.3, "zero3d/deepspeed": 1 / 2, "zero3d/fused_fp32": 1 / 0.8}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbh1", "zbv")


@dataclass(frozen=True)
class Row:
    """One run of a script. wanted: the ratio that is aimed at, by "ours/other's", as the script calls them."""

    script: str
    title: str
    size: str
    arguments: Sequence[str] = ()
    wanted: Mapping[str, float] = field(default_factory=dict)
    first: bool = True
    """Part of the short run too."""

    @property
    def name(self) -> str:
        return f"{self.script}: {self.title}, {self.size}"


Lines = dict[str, list[list[str]]]
"""Of the table, by the name of a row: see `lines`."""


def rows() -> Iterator[Row]:
    for size in ("small", "medium"):
        for title, contenders, small, medium in (
            ("level 0", "zero0 ddp ddp_norm alone apart", {"zero0/ddp": 1.0}, {"zero0/ddp": 1.0, "zero0/alone": 1.1}),
            (
                "level 1",
                "zero1 redundancy ds1 alone apart",
                {"zero1/redundancy": 0.97, "zero1/ds1": 0.88},
                {"zero1/redundancy": 0.95, "zero1/ds1": 0.70, "zero1/alone": 1.1},
            ),
            (
                "level 2",
                "zero2 fsdp2_kept ds2 alone apart",
                {"zero2/fsdp2_kept": 0.88, "zero2/ds2": 0.88},
                {"zero2/fsdp2_kept": 0.75, "zero2/ds2": 0.75, "zero2/alone": 1.1},
            ),
            (
                "level 3",
                "zero3 fsdp2 ds3 alone apart",
                {"zero3/fsdp2": 0.88, "zero3/ds3": 0.80},
                {"zero3/fsdp2": 0.70, "zero3/ds3": 0.75, "zero3/alone": 1.35},
            ),
            ("level 2, offload", "zero2_host ds2_host", {"zero2_host/ds2_host": 0.85}, {"zero2_host/ds2_host": 0.75}),
            ("level 3, offload", "zero3_host ds3_host", {"zero3_host/ds3_host": 0.85}, {"zero3_host/ds3_host": 0.75}),
        ):
            words = ["--contenders", *contenders.split(), *(["--medium"] if size == "medium" else [])]
            yield Row("step", title, size, words, medium if size == "medium" else small, first="offload" not in title)
    for size in ("small", "medium"):
        small_words = ["--small"] if size == "small" else []
        for schedule in SCHEDULES:
            words = ["--pp", "2", "--schedules", schedule, *small_words]
            first = size == "small" and schedule in ("1f1b", "zbv")
            yield Row("pipeline", f"pp 2, {schedule}", size, words, {"zero3d/torch": 0.95}, first=first)
        most = 0.85 if size == "small" else 0.90
        wanted = {"zero3d/torch": most, "zero3d_sequence/torch_sequence": most}
        yield Row("tensor", "tp 2", size, small_words, wanted, first=size == "small")
    for hosts in ("2", "4"):
        for dtype, level in ((dtype, level) for dtype in ("fp32", "bf16") for level in "123"):
            behind = "_bf16" if dtype == "bf16" else ""
            rivals = {"1": ["ds1"], "2": ["fsdp2_kept", "ds2"], "3": ["fsdp2", "ds3"]}[level]
            words = ["--hosts", hosts, "--dtypes", dtype, "--levels", level]
            wanted = {f"zero{level}{behind}/{rival}{behind}": 0.8 for rival in rivals if level != "1"}
            title = f"{hosts} hosts at 1 Gbit/s, {dtype}, level {level}"
            yield Row("links", title, "small", [*words, "--small"], wanted, first=False)
            yield Row("links", title, "medium", words, wanted, first=False)
    yield Row("checkpoint", "checkpoint", "small", ["--json", "--small"])
    yield Row("checkpoint", "checkpoint", "medium", ["--json"], first=False)
    yield Row("overhead", "400 small blocks", "tiny", [], {f"zero{level}/plain": 1.25 for level in range(1, 4)})
    yield Row(
        "host_adam",
        "host AdamW",
        "50 million",
        ["--millions", "50", "--threads", "1", "--json"],
        HOST_ADAM,
        first=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], help="scripts, by name")
    parser.add_argument("--rows", nargs="+", default=[], help="parts of their names")
    parser.add_argument("--rounds", type=int, help="in place of each script's own number")
    options = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    chosen = [
        row
        for row in rows()
        if (options.full or row.first)
        and row.script in (options.only or [row.script])
        and any(part in row.name for part in options.rows or [""])
    ]
    keeps = KEPT.is_file() and (options.only or options.rows)
    found: Lines = json.loads(KEPT.read_text(encoding="utf-8")) if keeps else {}
    failed = 0
    for number, row in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {row.name} ...", flush=True)
        began = time.monotonic()
        measured = run(row, options.rounds)
        failed += measured is None
        found[row.name] = [] if measured is None else list(lines(row, measured))
        for line in found[row.name]:
            print("    " + "  ".join(line), flush=True)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
        write({row.name: found[row.name] for row in rows() if row.name in found})
    print(f"{RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")
    sys.exit(1 if failed else 0)


def run(row: Row, rounds: int | None) -> dict[str, Any] | None:
    """What the script prints as JSON; None, and told, where it fails."""
    words = [sys.executable, str(FOLDER / f"{row.script}.py"), *row.arguments]
    words += ["--rounds", str(rounds)] if rounds and row.script != "host_adam" else []
    log = RUNS / (re.sub(r"[:, ]+", "-", row.name) + ".log")
    with open(log, "w", encoding="utf-8") as errors:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        print(f"    failed, with exit code {done.returncode}; see {log}", flush=True)
        return None
    return by_pairs(row.script, json.loads(printed[-1]))


def by_pairs(script: str, found: dict[str, Any]) -> dict[str, Any]:
    """With "ratio", "ratios", "median_ms" by name, whatever the script calls them."""
    if script == "pipeline":  # It has one pair only, which it does not name.
        found["ratio"] = {"zero3d/torch": found["ratio"]} if found["ratio"] is not None else {}
        found["ratios"] = {"zero3d/torch": found["ratios"]}
    if script == "checkpoint":
        found["median_ms"] = {}
    if script == "overhead":
        ratios = found["ratio_to_plain"]
        found["ratio"] = {f"{name}/plain": one for name, one in ratios.items() if name != "plain"}
    if script == "host_adam":  # Rates, of which more is better.
        (only,) = found["results"]
        found["ratio"] = {f"zero3d/{name}": round(1 / one, 3) for name, one in only["ours_over"].items()}
        found["median_ms"] = {}
    return found


def lines(row: Row, measured: Mapping[str, Any]) -> Iterator[list[str]]:
    """Of the table: row, size, ours and theirs, ratio, quartiles, wanted, times, bytes."""
    ratio: Mapping[str, float] = measured.get("ratio", {})
    wanted = row.wanted or measured.get("wanted", {})
    for pair, found in ratio.items():
        low, *_, high = measured.get("ratios", {}).get(pair) or [found, found]
        aim = f"{wanted[pair]:.2f}" + (" yes" if found <= wanted[pair] else " no") if pair in wanted else ""
        ours, _, other = pair.rpartition("/")
        times, sent = measured.get("median_ms", {}), measured.get("sent_mb", {})
        yield [
            row.title,
            row.size,
            f"{ours} / {other}",
            f"{found:.2f}",
            f"{low:.2f} to {high:.2f}",
            aim,
            " / ".join(f"{times[name]:.0f}" for name in (ours, other) if name in times),
            " / ".join(f"{sent[name]:.1f}" for name in (ours, other) if name in sent),
        ]
    for pair in measured.get("void", []) if isinstance(measured.get("void"), list) else []:
        yield [row.title, row.size, pair, "void", "", "", "", ""]


def write(found: Lines) -> None:
    """RESULTS.md and its picture, of all that has been measured; kept for later runs of some rows only."""
    KEPT.write_text(json.dumps(found, indent=1), encoding="utf-8")
    names = ("torch", "deepspeed", "transformers", "numpy")
    versions = ", ".join(f"{name} {one}" for name in names if (one := version_of(name)))
    head = ["row", "model", "ours / theirs", "ratio", "quartiles", "wanted, met", "ms", "MB sent a rank"]
    table = [head, ["---"] * len(head), *(line for some in found.values() for line in some)]
    text = [
        "# Measured",
        "",
        f"By `make bench-full` or parts of it, last on {date.today()}, on {cpu()}, {os.cpu_count()} cores, without a "
        f"GPU; Python {platform.python_version()}, {versions}; gloo over loopback, two ranks of one thread.",
        "",
        "Ratios are medians over rounds of steps of the same round, ours over theirs: below 1 is faster. Small is a "
        "GPT of 10.5 million parameters, medium one of 88 million. `alone` is one process with two threads and all of "
        "the batch, `apart` two processes that send each other nothing: what computing costs. Each row's script says "
        "what its contenders are.",
        "",
        "![Ratios of step times](results.svg)" if picture(found) else "",
        "",
        *("| " + " | ".join(line) + " |" for line in table),
        "",
    ]
    RESULTS.write_text("\n".join(text), encoding="utf-8")


def picture(found: Lines) -> bool:
    """Bars of all ratios with a peer; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return PICTURE.is_file()
    matplotlib.use("svg")
    from matplotlib import pyplot

    bars = [
        (f"{line[0]}, {line[1]}: {line[2]}", float(line[3]))
        for some in found.values()
        for line in some
        if line[3] != "void" and not line[2].endswith(("alone", "apart", "plain"))
    ][::-1]
    if not bars:
        return PICTURE.is_file()
    figure, axes = pyplot.subplots(figsize=(9, 0.28 * len(bars) + 1))
    axes.barh([name for name, _ in bars], [ratio for _, ratio in bars], color="#3366aa")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time, ours over theirs (below 1: faster)")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return True


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()

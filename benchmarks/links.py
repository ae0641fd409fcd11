"""Steps of ZeRO levels beside FSDP2's and DeepSpeed's over links of a chosen speed; prints one JSON line for each run.

    python benchmarks/links.py [--hosts 2 4] [--rate 1gbit] [--dtypes fp32 bf16] [--levels 1 2 3] [--rounds 4] [--small]

Hosts are network namespaces on this machine, of one rank each, whose cards send no more than `rate` (see
tests/hosts.py: Linux, root and iproute2). step.py runs on them; `apart` computes and sends nothing, `wire` sends what
levels 0 to 2 must and computes nothing, which is how fast the link is found to be.

    exposed      a step less what computing takes
    exposed_least  bytes of the formula at the link's measured rate, less the backward that they could hide behind

Formulas: 2 Psi (N - 1) / N elements a step and rank at levels 0 to 2, 3 Psi (N - 1) / N at level 3.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from step import surroundings  # noqa: E402

from tests.hosts import PORT, address, hosts, why_not  # noqa: E402

CONTENDERS = {
    0: "zero0 ddp",
    1: "zero1 redundancy ds1",
    2: "zero2 fsdp2_kept ds2",
    3: "zero3 fsdp2 ds3",
}
IN_BF16 = {0: "zero0", 1: "zero1 ds1", 2: "zero2 fsdp2_kept ds2", 3: "zero3 fsdp2 ds3"}
NUM_BYTES = {"fp32": 4, "bf16": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", default="1gbit", help="what a card may send, in tc's units")
    parser.add_argument("--dtypes", nargs="+", choices=NUM_BYTES, default=list(NUM_BYTES))
    parser.add_argument("--levels", type=int, nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="that a contender makes in its turn of a round")
    parser.add_argument("--small", action="store_true", help="a model of 10 million parameters; else of 88 million")
    options = parser.parse_args()
    if missing := why_not():
        sys.exit(f"no test hosts can be made here: {missing}")
    for number in options.hosts:
        for dtype in options.dtypes:
            for level in options.levels:
                print(json.dumps(run(number, dtype, level, options)), flush=True)


def run(number: int, dtype: str, level: int, options: argparse.Namespace) -> dict[str, Any]:
    behind = "_bf16" if dtype == "bf16" else ""
    contenders = [*(IN_BF16 if behind else CONTENDERS)[level].split(), "apart", "wire"]
    words = ["--contenders", *(name + behind for name in contenders), "--rounds", str(options.rounds)]
    words += ["--steps", str(options.steps), *([] if options.small else ["--medium"])]
    found = on_hosts(number, options.rate, words)
    times, sent = found["median_ms"], found["sent_mb"]
    rate = sent[f"wire{behind}"] / times[f"wire{behind}"]
    moved = (3 if level == 3 else 2) * found["parameters"] * (number - 1) / number * NUM_BYTES[dtype] / 1e6
    exposed = {name: round(one - times[f"apart{behind}"]) for name, one in times.items()}
    return {
        **found,
        "benchmark": "links",
        "hosts": number,
        "rate": options.rate,
        "dtype": dtype,
        "level": level,
        "measured_gbit": round(rate * 8, 3),
        "formula_mb": round(moved, 2),
        "exposed_ms": exposed,
        "exposed_least_ms": round(moved / rate - found["backward_ms"]),
    }


def on_hosts(number: int, rate: str, words: list[str]) -> dict[str, Any]:
    """What step.py prints on the first of them."""
    with hosts(number, rate) as names:
        ranks = []
        for index, name in enumerate(names):
            launch = ["--nnodes", str(number), "--node-rank", str(index), "--nproc-per-node", "1"]
            launch += ["--master-addr", address(0), "--master-port", str(PORT)]
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *launch]
            command += [str(Path(__file__).parent / "step.py"), *words]
            output = subprocess.PIPE if index == 0 else subprocess.DEVNULL
            environment = os.environ | surroundings("eth0")
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, text=True))
        printed, _ = ranks[0].communicate()
        codes = [one.wait() for one in ranks]
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if any(codes) or not lines:
        sys.exit(f"step.py failed on the hosts, with exit codes {codes}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    main()

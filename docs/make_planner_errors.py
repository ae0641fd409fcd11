"""Writes docs/planner.md: what the planner predicts for published runs, beside what was measured.

Usage: python docs/make_planner_errors.py
"""

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from zero3d.dryrun.count import Subject, count
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.planner.hardware import PRESETS, Cluster, find
from zero3d.planner.run import Run
from zero3d.planner.speed import RECOMPUTE, Again, Software, Speed
from zero3d.planner.timing import stage_times, step_time, transfer
from zero3d.planner.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from published_models import GPT, Sizes

FACTS = Path(__file__).parents[1] / "tests" / "golden" / "published_throughput.csv"
PAGE = Path(__file__).with_name("planner.md")

SCHEDULES = {
    "none": "1f1b",
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "interleaved-1F1B": "interleaved",
    "ZB-1p": "zbh1",
    "ZB-2p": "zbh2",
    "ZB-V": "zbv",
}
AGAIN = {
    "none": RECOMPUTE["none"],
    "full": RECOMPUTE["block"],
    "selective": RECOMPUTE["attention"],
    # torchtitan keeps every other block, or attention and the outputs of every other product.
    "selective layer": Again(products=0.5, attention=0.5, moving=0.5, tp=0.5),
    "selective op": Again(products=0.5, moving=1.0),
}


@dataclass(frozen=True)
class Prediction:
    """Of one row of the facts."""

    row: Mapping[str, str]
    value: float

    @property
    def published(self) -> float:
        return float(self.row["value"])

    @property
    def error(self) -> float:
        """(predicted - published) / published"""
        return self.value / self.published - 1


def rows() -> list[dict[str, str]]:
    with FACTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def predict(row: Mapping[str, str]) -> Prediction:
    cluster = find(row["device"])
    workload, run = workload_of(row), run_of(row)
    return Prediction(row, VALUES[row["what"].partition(" ")[0]](cluster, workload, run, row))


def _step(cluster: Cluster, workload: Workload, run: Run, row: Mapping[str, str]) -> float:
    step = step_time(cluster, workload, run)
    unit = row["unit"]
    if unit == "tokens/s/GPU":
        return step.tokens_per_second / step.devices
    if unit == "samples/s/GPU":
        return run.samples / step.seconds / step.devices
    if unit.startswith("TFLOP/s"):
        return step.flops_per_device / 1e12
    if unit.startswith("PFLOP/s"):
        return step.flops_per_device * step.devices / 1e15
    if unit == "s/iteration":
        return step.seconds
    if unit == "% MFU":
        return 100 * step.mfu
    if unit == "% HFU":
        return 100 * step.hfu
    assert unit == "days for 300B tokens", unit
    return 300e9 / step.tokens_per_second / 86400


def _stage(cluster: Cluster, workload: Workload, run: Run, row: Mapping[str, str]) -> float:
    middle = stage_times(cluster, workload, run)[run.stages // 2]
    found = {"TF": middle.forward, "TB": middle.input_backward, "TW": middle.weight_backward}
    return 1e3 * found[row["what"]]


def _block(cluster: Cluster, workload: Workload, run: Run, row: Mapping[str, str]) -> float:
    speed = Speed(cluster=cluster, dtype=workload.dtype, tp=workload.tp, software=run.software)
    part = speed.part(workload.kinds[0], run.micro_batch, run.recompute)
    passes = {"fwd": part.forward.total, "bwd": part.whole_backward}
    passes["both"] = sum(passes.values())
    return 1e3 * passes[row["what"].split()[1]]


VALUES: Mapping[str, Callable[[Cluster, Workload, Run, Mapping[str, str]], float]] = {
    "step": _step,
    "TF": _stage,
    "TB": _stage,
    "TW": _stage,
    "Tcomm": lambda cluster, workload, run, row: 1e3 * transfer(cluster, workload, run),
    "block": _block,
}


def run_of(row: Mapping[str, str]) -> Run:
    number = {
        key: int(row[key])
        for key in ("dp", "tp", "pp", "cp", "level", "micro_batch", "micro_batches", "stages_per_rank", "layers")
    }
    kind, schedule = row["software"].split()[0], SCHEDULES[row["schedule"]]
    per_rank = {"zbv": 2, "interleaved": max(number["stages_per_rank"], 2)}.get(schedule, 1)
    if row["schedule"] == "1F1B-I":
        per_rank = (number["layers"] + 2) // number["pp"]  # One block a stage.
    once = number["level"] < 2 or number["pp"] > 1
    return Run(
        # Ranks that share a sequence each take a part of a sample, and share what dp shares.
        dp=number["dp"] * number["cp"],
        micro_batch=number["micro_batch"] / number["cp"],
        micro_batches=number["micro_batches"],
        pp=number["pp"],
        schedule=schedule,
        stages_per_rank=per_rank,
        stage_blocks=_stage_blocks(row, number["pp"] * per_rank),
        level=number["level"],
        reduce="step" if once else "micro-batch",
        keep_gathered=number["level"] == 3 and number["pp"] > 1,
        travel=4 if kind == "torchtitan" else 2,
        held=4 if kind == "torchtitan" else 2,
        recompute=AGAIN[
            "selective op" if kind == "torchtitan" and row["recompute"] == "selective" else row["recompute"]
        ],
        software=_software(row),
    )


def _software(row: Mapping[str, str]) -> Software:
    kind, *options = row["software"].replace("+", " ").split()
    return Software(
        products="fp8" if "float8" in options else None,
        compiled="compile" in options,
        overlap_dp=kind != "megatron",
        fused_sums=kind == "megatron",
        # Megatron-LM of 2021 waited for each call over tp.
        overlap_tp=not row["source"].startswith("Narayanan"),
        async_tp=any(one.lower() == "asynctp" for one in options),
        # llm-foundry's runs are of FlashAttention of 2022, which Dao 2023 measures 1.7 times slower than its successor.
        # Of ranks that share a causal sequence in equal runs the last one has 2 - 1/cp times its part of the scores.
        attention=1 / 1.7 if kind == "llm-foundry" else 1 / (2 - 1 / int(row["cp"])),
        one_ring=kind == "deepspeed",
        scattered=kind == "megatron",
    )


def _stage_blocks(row: Mapping[str, str], stages: int) -> tuple[int, ...]:
    """Qi et al. leave a block out of the first and of the last stage, for the embedding and the head."""
    layers = int(row["layers"])
    if not row["id"].startswith("zb-"):
        return (layers // stages,) * stages if layers % stages == 0 and stages > 1 else ()
    each = (layers + 2) // stages
    sizes = [each] * stages
    sizes[0] = sizes[-1] = each - 1
    return tuple(sizes)


def workload_of(row: Mapping[str, str]) -> Workload:
    keys = ("hidden", "heads", "kv_heads", "mlp_width", "sequence", "vocabulary", "tp")
    kind = row["software"].split()[0]
    counted = _count(kind, int(row["sequence_parallel"]) > 0, *(int(row[key]) for key in keys))
    return replace(counted, order=[0] * int(row["layers"]))


@cache
def _count(
    kind: str,
    sequence_parallel: bool,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    sequence: int,
    vocabulary: int,
    tp: int,
) -> Workload:
    """Of a model of two blocks: one is counted, however many there are."""

    def llama() -> nn.Module:
        config = LlamaConfig(
            vocabulary=vocabulary,
            sequence_length=sequence,
            width=width,
            layers=2,
            heads=heads,
            kv_heads=kv_heads,
            mlp_width=mlp_width,
        )
        return Llama(config)

    def gpt() -> nn.Module:
        fused = kind == "llm-foundry"
        return GPT(Sizes(layers=2, width=width, heads=heads, sequence=sequence, vocabulary=vocabulary, fused=fused))

    def batch(samples: int) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(samples, sequence, dtype=torch.long)}

    subject = Subject(build=llama if kind == "torchtitan" else gpt, batch=batch, tokens=sequence, name=kind)
    return count(subject, tp=tp, sequence_parallel=sequence_parallel, memory=False)


SOURCES = {
    "Narayanan": "[Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), tables 1 and 2 (Megatron-LM; DeepSpeed's "
    "ZeRO-3)",
    "Korthikanti": "[Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), tables 4 and 5, section 6.3",
    "Qi": "[Qi et al. 2023](https://arxiv.org/abs/2401.10241), tables 4, 6 and 9 (zero bubble)",
    "MosaicML": "[MosaicML llm-foundry](https://github.com/mosaicml/llm-foundry), scripts/train/benchmarking",
    "torchtitan": "[torchtitan](https://github.com/pytorch/torchtitan), docs/performance.md and benchmarks",
}


def lines(predictions: Iterable[Prediction]) -> list[str]:
    """Of the table of all rows."""
    return [_line(one) for one in predictions]


def _line(one: Prediction) -> str:
    row = one.row
    sizes = " x ".join(row[key] for key in ("dp", "tp", "pp"))
    sizes += f" x {row['cp']} cp" if row["cp"] != "1" else ""
    how = [f"level {row['level']}", f"{row['micro_batches']} x {row['micro_batch']}"]
    how += [row["schedule"]] if row["schedule"] != "none" else []
    how += [f"recompute {row['recompute']}"] if row["recompute"] != "none" else []
    how += ["sp"] if row["sequence_parallel"] == "1" else []
    what = {"step": row["unit"]}.get(row["what"], f"{row['unit']} {row['what']}")
    cells = (row["id"], sizes, ", ".join(how), what, f"{one.published:.4g}", f"{one.value:.4g}", f"{one.error:+.0%}")
    return f"| {' | '.join(cells)} |"


def summary(predictions: Sequence[Prediction]) -> list[str]:
    told = []
    for name, source in SOURCES.items():
        told.append(_errors(source, [one for one in predictions if one.row["source"].startswith(name)]))
    for device in dict.fromkeys(one.row["device"] for one in predictions):
        told.append(_errors(f"all on {device}", [one for one in predictions if one.row["device"] == device]))
    return [*told, _errors("**all**", predictions)]


def _errors(name: str, predictions: Sequence[Prediction]) -> str:
    found = sorted(abs(one.error) for one in predictions)
    return f"| {name} | {len(found)} | {median(found):.1%} | {found[int(0.9 * len(found))]:.1%} | {found[-1]:.0%} |"


def constants() -> list[str]:
    """Of each device kind."""
    told = []
    for name, cluster in PRESETS.items():
        device, rates = cluster.device, cluster.device.rates
        peak = device.flops.get("bf16", device.flops.get("fp16", 0)) / 1e12
        told.append(
            f"| {name} | {peak:g} | {device.bandwidth / 1e9:g} | {cluster.inside.bandwidth / 1e9:g} | "
            f"{cluster.across.bandwidth / 1e9:g} | {rates.matrix:g} | {rates.half:g} | {rates.attention:g} | "
            f"{rates.moving:g} | {rates.link:g} | {rates.hidden:g} |"
        )
    return told


def page(predictions: Sequence[Prediction]) -> str:
    return HEAD.format(
        constants="\n".join(constants()), summary="\n".join(summary(predictions)), rows="\n".join(lines(predictions))
    )


HEAD = """\
# What the planner predicts

<!-- Made by docs/make_planner_errors.py. Change that, not this page. -->

The planner says how long a step takes before anything is bought or started. It counts what one tensor-parallel rank
computes, reads, keeps and sends for a block of each kind, by running the model on tensors without data
(`dryrun/count.py`), and turns that into seconds (`planner/timing.py`):

- **Products of matrices** of dims m, n, k reach `matrix` / ((1 + half/m) (1 + half/n) (1 + half/k)) of the peak.
- **Attention** that is one operation reaches `attention` of the peak, for those scores that a causal mask leaves.
- **All other operations** read and write their tensors at `moving` of the memory bandwidth, one by one.
- **Collectives** are rings over two levels of links of which they reach `link`; all devices of a node share what leaves
  it. Of the time that traffic and computing overlap, `hidden` is won: both want memory and multiprocessors.
- **Calls that all ranks wait in**, those over tp and the gathers of level 3, take `skew` of the computing between them
  more: now one rank is the slowest, now another. It is 0 for the devices below, and measured by `zero3d calibrate`.
- **Pipelines** run the schedule's own actions in the simulator, with messages between stages.
- **The update** reads and writes each model state once. On the host it takes the host's own rate.

There is one set of constants for each kind of device, and none for a model or a run. Where others' software differs
from zero3d in ways that its authors describe, the prediction says so (`planner/speed.py`, `Software`): operations
compiled into each other, products in fp8, FlashAttention of 2022 or 2023, calls that are waited for. `zero3d calibrate`
measures the constants of another machine. Peaks are in TFLOP/s in 16 bit, memory and links (in a node, and a device's
share of what leaves it) in GB/s.

| device | peak | memory | inside | across | matrix | half | attention | moving | link | hidden |
|---|---|---|---|---|---|---|---|---|---|---|
{constants}

No row below is of V100-32GB, whose constants are near a few figures of Megatron-LM and ZeRO-Offload, nor of H200, which
has those of the H100. CPU is a guess for one core of a server, to be replaced by a profile.

## How far it is off

Errors of the predictions below: predicted over published, less one.

| runs | rows | median | 90th percentile | largest |
|---|---|---|---|---|
{summary}

Published runs with context parallelism (`cp`), which zero3d does not have, are taken as ranks with a part of a sample
each. Not in the table are formulas, and rows that do not say in which layout they ran.

## On a machine that was calibrated

`benchmarks/predicted.py` has two ranks of one thread train a GPT in twelve layouts (levels 0 to 3, micro-batches,
recomputing, tp, pp), and predicts each from a profile of `zero3d calibrate`. On two CPU cores that are shared with
others, three profiles were taken and each followed by a run in bf16 (`--dtype bf16`) and one in fp32. Of these 72 steps
the median error was 11.6 %, the largest 27 %; medians of single runs were 9.7, 17.3 and 13.2 % in bf16, and 5.5, 8.7
and 16.0 % in fp32.

Kendall's tau of the predicted order and that of the runs' mean was 0.76 in bf16 and 0.73 in fp32. Of a single run it
was 0.64 to 0.70, of runs on quieter days up to 0.88; two runs of this machine agree with each other as far as 0.48 in
bf16 and 0.67 in fp32, as half of the layouts differ by less than what it drifts by.

Short steps are predicted too fast where all cores compute: each call then waits for the system to make room for it.
A step of examples/demo.toml, of 6 blocks of width 128, takes some 100 ms on these two cores, and is predicted to take
51 in bf16 and 78 in fp32; on one rank it takes 62 and 68, predicted 49 and 75.

## How far its memory is off

Peaks of a rank's memory are laid beside a rehearsal of the real step, which is within 1 % of what a run allocates.
`python -m tests.planned` prints all points: five models, levels 0 to 3, recomputing, offload, bf16, tp, and pp with its
schedules. Of 117 ranks at 86 points the median error is 0.05 % and the largest 1.8 %. At every point there are as many
calls over dp and pp as in the rehearsal; over tp with sequence parallel one in 130 is not seen.

## All rows

Layouts are dp x tp x pp, then the level, micro-batches x samples of each. Single times are of a stage in the middle
(TF, TB and TW: forward, backward of inputs, gradients of weights; Tcomm: a message) or of one block.

| run | layout | how | unit | published | predicted | error |
|---|---|---|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    PAGE.write_text(page([predict(row) for row in rows()]), encoding="utf-8")

"""A run at Weights & Biases, where its package is installed and `run.wandb` names a project."""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.listening import Listening

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped
    from zero3d.train import Plan, Summary
    from zero3d.watching.notice import Notice
    from zero3d.watching.watch import RanksReport


def check_wandb(config: Config) -> None:
    """Raises `ConfigError` where it is asked for and cannot be."""
    if config.run.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"run.wandb = {config.run.wandb!r} needs the package wandb, which is not installed",
            hint="pip install wandb, or leave run.wandb out.",
            where="run.wandb",
        )


class WeightsAndBiases(Listening):
    """Loss, norm, learning rate, speed, MFU and how ranks compare, by step; notices as alerts."""

    def __init__(self, project: str, folder: Path) -> None:
        self._project = project
        self._folder = folder
        self._run: Any = None
        self._ended_well = False

    def started(self, plan: "Plan") -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project=self._project,
            name=plan.config.run.name,
            dir=str(self._folder),
            config={**plan.config.model_dump(mode="json"), "world": plan.world, "parameters": plan.parameters},
        )

    def stepped(self, report: "StepReport") -> None:
        values = {
            "train/loss": report.loss,
            "train/grad_norm": report.grad_norm,
            "train/lr": report.lr,
            "train/tokens_per_second": report.tokens / report.seconds,
        }
        if report.mfu is not None:
            values["train/mfu"] = report.mfu
        self._run.log(values, step=report.step)

    def noticed(self, notice: "Notice") -> None:
        self._run.alert(title=notice.kind, text=f"step {notice.step}: {notice.message}")

    def compared(self, ranks: "RanksReport") -> None:
        values = {f"ranks/busy_seconds_{rank}": seconds for rank, seconds in enumerate(ranks.busy)}
        values |= {f"ranks/memory_bytes_{rank}": held for rank, held in enumerate(ranks.memory)}
        values |= {f"sent_bytes/{axis}": sent for axis, sent in ranks.sent.items()}
        self._run.log(values, step=ranks.step)

    def done(self, summary: "Summary") -> None:
        self._ended_well = True
        self._run.summary["heldout_loss"] = summary.heldout_loss

    def stopped(self, stopped: "Stopped") -> None:
        self._ended_well = True
        self._run.summary["stopped"] = stopped.told

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._ended_well else 1)

"""plan.json: what was known of a run before its first step. Pure.

The run writes it, `zero3d report` reads it. It stands beside config.toml, which says what was asked for.
"""

from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, Field, model_validator

from zero3d.layout import Layout, Place

if TYPE_CHECKING:
    from zero3d.train import Plan

KINDS = ("weights", "gradients", "optimizer")
"""Of model states on the device."""
AWAY = ("host", "disk", "staging")
"""Of what offload keeps elsewhere, as `held_bytes` has them."""


class States(BaseModel):
    """Bytes of model states that a rank holds: three kinds on its device, and all that is elsewhere."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    disk: int = 0


class PlanFile(BaseModel):
    """dp, tp, pp: the layout. By index on pp: stages: first and last block of each of its stages (None: it has none);
    states: model states at levels 0 to 3. held_bytes: kind -> what each rank will hold of model states, by rank.
    group: ranks that share one copy of what ZeRO shards. bits_per_nat: bits per byte of text that a loss of one nat
    is. first_step: how many steps were made before, with the checkpoint that `resumed` names."""

    format: Literal[1] = 1
    world: int
    device: str
    dp: int
    tp: int
    pp: int
    level: int = Field(ge=0)
    group: int
    parameters: int
    trainable: int
    dtypes: list[tuple[str, str]]
    stages: list[list[tuple[int, int] | None]]
    states: list[list[States]]
    held_bytes: dict[str, list[int]]
    steps: int
    train_tokens: int
    documents: int
    vocabulary: int
    bits_per_nat: float | None
    first_step: int
    resumed: str

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if min(self.dp, self.tp, self.pp, self.group) < 1 or self.dp * self.tp * self.pp != self.world:
            raise ValueError(f"dp {self.dp} x tp {self.tp} x pp {self.pp} are not {self.world} ranks")
        if not len(self.stages) == len(self.states) == self.pp or any(len(one) <= self.level for one in self.states):
            raise ValueError(f"stages and states are not those of pp {self.pp} at level {self.level}")
        if not {*KINDS} <= {*self.held_bytes} or any(len(one) != self.world for one in self.held_bytes.values()):
            raise ValueError(f"held_bytes are not those of {self.world} ranks")
        return self

    @property
    def layout(self) -> Layout:
        return Layout(dp=self.dp, tp=self.tp, pp=self.pp)

    def part(self, place: Place, kind: str) -> tuple[int, int]:
        """(number, of so many): which part ZeRO leaves a rank of what dp, tp and pp gave it; (1, 1): all of it."""
        held, whole = (getattr(self.states[place.pp][level], kind) for level in (self.level, 0))
        return (1, 1) if held == whole else (place.dp % self.group + 1, self.group)


def of_plan(plan: "Plan") -> PlanFile:
    """The plan as its file has it."""
    config = plan.config
    dp, tp, pp = config.parallel.dp, config.parallel.tp, config.parallel.pp
    assert dp != "auto", "resolved"
    return PlanFile(
        world=plan.world,
        device=plan.device,
        dp=dp,
        tp=tp,
        pp=pp,
        level=config.zero.level,
        group=dp // config.zero.replicas,
        parameters=plan.parameters,
        trainable=plan.trainable,
        dtypes=list(plan.dtypes),
        stages=[[(one[0], one[-1]) if one else None for one in stages] for stages in plan.stages],
        states=[
            [
                States(
                    weights=one.weights,
                    gradients=one.gradients,
                    optimizer=one.optimizer,
                    host=one.host,
                    disk=one.disk,
                )
                for one in levels
            ]
            for levels in plan.predicted
        ],
        held_bytes=_held(plan, Layout(dp=dp, tp=tp, pp=pp)),
        steps=config.num_steps,
        train_tokens=plan.train_tokens,
        documents=plan.documents,
        vocabulary=plan.vocabulary,
        bits_per_nat=plan.bits_per_nat,
        first_step=plan.first_step,
        resumed=plan.resumed,
    )


def _held(plan: "Plan", layout: Layout) -> dict[str, list[int]]:
    away = {rank: need.held for machine in plan.host_needs for rank, need in machine.needs.items()}
    ranks = range(layout.world)
    mine = [plan.predicted[layout.place(rank).pp][plan.config.zero.level] for rank in ranks]
    held = {kind: [getattr(one, kind) for one in mine] for kind in KINDS}
    if away:
        held |= {kind: [away[rank][kind] if rank in away else 0 for rank in ranks] for kind in AWAY}
    return held

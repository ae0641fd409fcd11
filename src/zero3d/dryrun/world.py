"""One rank of a world of any size, on paper."""

import torch
from torch import Tensor

from zero3d.comm.hybrid_axis import HybridAxis
from zero3d.comm.lookout import Leg
from zero3d.comm.mesh import Mesh
from zero3d.comm.paper_wire import PaperWire
from zero3d.comm.process_axis import ProcessAxis
from zero3d.comm.recorded_axis import RecordedAxis
from zero3d.comm.solo_axis import SoloAxis
from zero3d.computed import is_fake
from zero3d.contracts import Axis
from zero3d.dryrun.mail import MailWire, PostOffice
from zero3d.exact import LIMBS
from zero3d.layout import AXES, AxisName, Layout

DEVICE = torch.device("cpu")
"""Fake tensors of another device need a torch that was built for it."""
TALLY = 2 * LIMBS + 3
"""Numbers that the ranks of a replica add up once a step; number `LIMBS` counts targets (see optim.tally)."""


class ReplicaWire(PaperWire):
    """Between the ranks of a replica, one of which counts targets, whether or not it is this one."""

    def spread(self, mine: Tensor, rows: Tensor, tag: int) -> list[Leg]:
        legs = super().spread(mine, rows, tag)
        if mine.numel() == TALLY and not is_fake(mine) and not int(mine[LIMBS]):
            rows[self.index - 1][LIMBS] = 1
        return legs


def paper_mesh(layout: Layout, rank: int, office: PostOffice, replicas: int = 1) -> tuple[Mesh, MailWire | None]:
    """Where `rank` stands, and its wire to the other stages of its pipeline, if there are any."""
    place = layout.place(rank)
    mail = MailWire(office, layout.pp, place.pp, "pp") if layout.pp > 1 else None

    def axis(name: AxisName) -> Axis:
        size, index = getattr(layout, name), getattr(place, name)
        if size == 1:
            return SoloAxis()
        wire = mail if name == "pp" and mail is not None else PaperWire(size, index, name)
        return ProcessAxis(wire, DEVICE)

    axes: dict[str, RecordedAxis] = {name: RecordedAxis(axis(name), name=name) for name in AXES}
    within = layout.tp * layout.pp
    model = ReplicaWire(within, place.pp * layout.tp + place.tp, "model")
    mesh = Mesh(
        layout=layout,
        rank=rank,
        device=DEVICE,
        axes=axes,
        model=ProcessAxis(model, DEVICE) if within > 1 else SoloAxis(),
        everyone=_paper(layout.world, rank, "everyone"),
        hybrid=_hybrid(layout, place.dp, replicas, axes["dp"]) if replicas > 1 else None,
        on_paper=True,
    )
    return mesh, mail


def _paper(size: int, index: int, name: str) -> Axis:
    return ProcessAxis(PaperWire(size, index, name), DEVICE) if size > 1 else SoloAxis()


def _hybrid(layout: Layout, index: int, replicas: int, everyone: RecordedAxis) -> HybridAxis:
    size = layout.dp // replicas
    group, member = divmod(index, size)
    within = RecordedAxis(_paper(size, member, "within"), everyone)
    across = RecordedAxis(_paper(replicas, group, "across"), everyone)
    return HybridAxis(within, across, everyone, DEVICE)

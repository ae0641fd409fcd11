"""One entry of a schedule. Pure."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """Compute `kind` of micro-batch `micro_batch` in stage `stage`; printed as F0, B0, F1, ..."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"

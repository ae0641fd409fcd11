"""One exception tree; what the command prints and the code it leaves with.

    Zero3dError                      exit code
    ├── UsageError (ValueError)          2      bad input or a refused configuration
    │   ├── ConfigError                  2      a key or value of the configuration
    │   └── DataError                    2      a source, tokenizer or batch
    ├── ReleasedParameterError           2      a parameter's data was touched while it is released
    ├── OutOfSpaceError                  3      memory or disk
    ├── NonFiniteError                   4      numbers went wrong on some rank
    ├── DivergedError                    4      ranks did different things
    └── RankFailedError                  4      a rank died or stopped answering

Every error carries three short texts: what happened, where, and what to do.
"""

import errno
from typing import Final

DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of an `OSError` that says so."""


class Zero3dError(Exception):
    """What happened, where, what to do. `exit_code` is what the command leaves with."""

    exit_code = 4

    def __init__(self, message: str, *, hint: str = "", where: str = "") -> None:
        self.message = message
        self.where = where
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f"\n{self.hint}" if self.hint else ""
        return f"{self.message}{place}{advice}"

    def as_event(self) -> dict[str, object]:
        """The error as a line of `--json` output."""
        place = f" ({self.where})" if self.where else ""
        return {"event": "error", "code": self.exit_code, "message": self.message + place, "hint": self.hint}


class UsageError(Zero3dError, ValueError):
    """What was asked for cannot be done as it was asked; nothing has been changed."""

    exit_code = 2


class ConfigError(UsageError):
    """A key or a value of the configuration cannot be honoured."""


class DataError(UsageError):
    """A data source, a tokenizer or a batch is missing, unreadable or of the wrong shape."""


class ReleasedParameterError(Zero3dError, RuntimeError):
    """The data of a parameter was touched while only its shards are held."""

    exit_code = 2


class OutOfSpaceError(Zero3dError):
    """Memory, of a device or the host, or a disk is full."""

    exit_code = 3


class NonFiniteError(Zero3dError, ArithmeticError):
    """Gradients or loss are not finite and training cannot go on."""


class DivergedError(Zero3dError, RuntimeError):
    """Ranks did different things in what should have been the same step."""


class RankFailedError(Zero3dError, RuntimeError):
    """A rank died or did not answer within the time-out."""


def one_line(error: BaseException) -> str:
    """Its kind and all that it says, for a message."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))

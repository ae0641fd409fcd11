"""What every rank does around its work: end with its parent, and say what went wrong once, in one place."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero3d.cli.failure import as_known, describe, is_echo
from zero3d.listening import Listening
from zero3d.records import as_line, stopped_event

if TYPE_CHECKING:
    from zero3d.reports import StepReport
    from zero3d.stopping import Stopped

PARENT = "ZERO3D_PARENT"
"""Process id of the `zero3d` that started this rank; not set under torchrun."""
STEP_FILE = "ZERO3D_STEP_FILE"
"""Where rank 0 leaves the number of the last step, for the `zero3d` that started it."""
TOKENS = "ZERO3D_TOKENS"
"""Name of the token files that the parent prepared."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PR_SET_PDEATHSIG = 1
FIRST_SECONDS = 5.0
"""How long ranks wait, under torchrun, for the first of their machine to tell what all of them found."""
ECHO_SECONDS = 0.5
"""How long a rank that only lost another one waits, under torchrun, for one of its machine that knows why."""
TOLD = "zero3d-told-"
"""Beside the error files of a machine's ranks: what one of them has told."""


def started_as(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, world), where we or torchrun have started this process as a rank."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return None


def run_as_rank(work: Callable[[], int | None], environment: Mapping[str, str], *, debug: bool, as_json: bool) -> int:
    """Does `work`, which may give an exit code; what it raises is written down for the parent, or printed under
    torchrun. -> exit code."""
    # Waiting for another rank happens in native code, where only the default handlers end a process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent, rank = environment.get(PARENT), int(environment["RANK"])
    if parent is not None:
        end_with(int(parent))
    try:
        return work() or 0
    except Exception as error:
        trace = traceback.format_exc()
        told = describe(error, rank, time.time(), trace)
        if environment.get(ERROR_FILE):
            Path(environment[ERROR_FILE]).write_text(json.dumps(told), encoding="utf-8")
        if debug:
            print(f"rank {rank}: {trace}", file=sys.stderr)
        known = as_known(error)
        # What is wrong with the input is found by all ranks alike: the first of each machine tells it. torchrun ends
        # all ranks when one has ended, so the others let it speak first.
        told_by_first = int(environment.get("LOCAL_RANK", rank)) != 0 and known.exit_code == 2
        if parent is None and told_by_first:
            time.sleep(FIRST_SECONDS)
        if parent is None and not told_by_first and _is_news(environment, str(known), echo=is_echo(error)):
            print(f"zero3d: rank {rank}: {known}", file=sys.stderr)
            if as_json:
                print(json.dumps(known.as_event()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: closing process groups can wait for ranks that no longer answer.
        os._exit(known.exit_code)


def _is_news(environment: Mapping[str, str], text: str, *, echo: bool) -> bool:
    """Whether no rank of this machine has told `text` yet, or, for an `echo` of another's end, anything at all.

    torchrun's error files of one attempt are in one folder, one below it for each rank."""
    if not environment.get(ERROR_FILE):
        return True
    folder = Path(environment[ERROR_FILE]).parent.parent
    if echo:
        time.sleep(ECHO_SECONDS)
        if any(folder.glob(f"{TOLD}*")):
            return False
    try:
        (folder / f"{TOLD}{'echo' if echo else zlib.crc32(text.encode())}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # The disk is full, say: better told twice than never.
        return True
    return True


class StepFile(Listening):
    """Keeps the number of the last step in a file, as a rank that is ended has no time to say it; and below it what
    came of a run that was asked to end."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115

    def stepped(self, report: "StepReport") -> None:
        self._file.seek(0)
        self._file.write(f"{report.step}\n")
        self._file.flush()

    def stopped(self, stopped: "Stopped") -> None:
        self._file.write(as_line(stopped_event(stopped)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def read(path: Path) -> int | None:
        """The last step that was done; None: none was."""
        try:
            return int(path.read_text(encoding="ascii").splitlines()[0])
        except (OSError, ValueError, IndexError):
            return None

    @staticmethod
    def read_end(path: Path) -> dict[str, Any] | None:
        """The `stopped` event of a run that was asked to end and has; None: it has not."""
        try:
            event = json.loads(path.read_text(encoding="ascii").splitlines()[1])
        except (OSError, ValueError, IndexError):
            return None
        return event if isinstance(event, dict) else None


def end_with(parent: int) -> None:
    """This process ends when `parent` does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

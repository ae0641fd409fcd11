"""What every rank does around its work: end with its parent, and say what went wrong once, in one place."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from zero3d.cli.failure import as_known, describe

PARENT = "ZERO3D_PARENT"
"""Process id of the `zero3d` that started this rank; not set under torchrun."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
PR_SET_PDEATHSIG = 1


def run_as_rank(work: Callable[[], None], environment: Mapping[str, str], *, debug: bool, as_json: bool) -> int:
    """Does `work`; what it raises is written down for the parent, or printed under torchrun. -> exit code."""
    # Waiting for another rank happens in native code, where only the default handlers end a process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent, rank = environment.get(PARENT), int(environment["RANK"])
    if parent is not None:
        end_with(int(parent))
    try:
        work()
    except Exception as error:
        trace = traceback.format_exc()
        told = describe(error, rank, time.time(), trace)
        if environment.get(ERROR_FILE):
            Path(environment[ERROR_FILE]).write_text(json.dumps(told), encoding="utf-8")
        if debug:
            print(f"rank {rank}: {trace}", file=sys.stderr)
        known = as_known(error)
        # What is wrong with the input is found by all ranks alike.
        if parent is None and (rank == 0 or known.exit_code != 2):
            print(f"zero3d: rank {rank}: {known}", file=sys.stderr)
            if as_json:
                print(json.dumps(known.as_event()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: closing process groups can wait for ranks that no longer answer.
        os._exit(known.exit_code)
    return 0


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

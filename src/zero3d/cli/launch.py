"""Starts the ranks of a run on this machine, watches them, and ends them: all or none.

Uses the part of torch's elastic launcher that starts processes and collects their error files. Ranks meet at
a store that this process serves on the loopback interface alone, and gloo and NCCL are told to use that too,
so nothing of the run can be reached from another machine.
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext

from zero3d.cli.failure import Failure, Interrupted, ReportedError, root_cause
from zero3d.cli.machine import cpu_cores, loopback_interface
from zero3d.cli.rank import PARENT, STEP_FILE, TOKENS, StepFile
from zero3d.cli.signals import NUMBERS

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.05
OTHERS_SECONDS = 1.0
"""After a rank failed the others get this long to say what they saw: the first to be noticed need not be the
first that failed."""
END_SECONDS = 2
"""A rank that is told to end and has not ended after this long is killed."""
ENDING = "zero3d: ending after the step under way; the same again ends it at once, without a checkpoint"


def run_ranks(
    arguments: Sequence[str], ranks: int, environment: Mapping[str, str], *, debug: bool
) -> ReportedError | None:
    """Runs `python -m zero3d ARGUMENTS` as `ranks` ranks; None when all of them did what they should.

    A signal of `signals.NUMBERS` is passed on to ranks that train, which then end by themselves, with a checkpoint; the
    second of a kind ends them at once. `Interrupted` is raised then. No rank lives when this returns or raises.
    """
    if not debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    folder = Path(tempfile.mkdtemp(prefix="zero3d-"))
    step_file = folder / "step"
    try:
        with _interruptible() as asked, _store() as port:
            environments = {
                rank: rank_environment(rank, ranks, port, environment, debug=debug) for rank in range(ranks)
            }
            environments[0][STEP_FILE] = str(step_file)
            context = _start(arguments, environments, folder, debug=debug)
            # Starting installs handlers that raise; ours, which only take note, cannot break a clean-up.
            for number in NUMBERS:
                signal.signal(number, asked.take_note)
            try:
                failed = _watch(context, asked, step_file)
            finally:
                context.close(signal.SIGKILL, timeout=END_SECONDS)
        if failed is None and (end := StepFile.read_end(step_file)) is not None:
            raise Interrupted(end["signal"], end["step"], end)
        return failed
    except SignalException as came:
        raise Interrupted(signal.Signals(came.sigval).name, StepFile.read(step_file)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rank_environment(rank: int, ranks: int, port: int, inherited: Mapping[str, str], *, debug: bool) -> dict[str, str]:
    """What torch and we look for in the environment of one rank of `ranks`; what the user has set stays."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": "zero3d",
        TOKENS: inherited.get(TOKENS, ""),
        PARENT: os.getpid(),
    }
    usual: dict[str, object] = {"OMP_NUM_THREADS": max(1, cpu_cores() // ranks)}
    interface = loopback_interface()
    if interface:
        usual |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    if not debug:
        usual |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {name: str(inherited.get(name, value)) for name, value in usual.items()} | {
        name: str(value) for name, value in told.items()
    }


def _start(
    arguments: Sequence[str], environments: dict[int, dict[str, str]], folder: Path, *, debug: bool
) -> SubprocessContext:
    # The screen is rank 0's; what others write there is kept for the case that they fail.
    redirects = {rank: Std.NONE if rank == 0 or debug else Std.ALL for rank in environments}
    context = start_processes(
        name="zero3d",
        entrypoint=sys.executable,
        args=dict.fromkeys(environments, ("-m", "zero3d", *arguments)),
        envs=environments,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
    )
    assert isinstance(context, SubprocessContext)
    return context


def _watch(context: SubprocessContext, asked: "_Asked", step_file: Path) -> ReportedError | None:
    """Until all ranks have ended well, or one has not."""
    seen_first: float | None = None
    passed_on = 0
    while True:
        if len(asked.signals) > passed_on:
            number, step = asked.signals[passed_on], StepFile.read(step_file)
            name = NUMBERS[number]
            # Before the first step there is nothing to save, and what happens may take long.
            if step is None or number in asked.signals[:passed_on]:
                raise Interrupted(name, step)
            passed_on += 1
            print(f"{ENDING} ({name})", file=sys.stderr, flush=True)
            for one in context.subprocess_handlers.values():
                one.proc.send_signal(number)
        codes = {rank: one.proc.poll() for rank, one in context.subprocess_handlers.items()}
        failed = {rank: code for rank, code in codes.items() if code}
        running = [rank for rank, code in codes.items() if code is None]
        if failed and seen_first is None:
            seen_first = time.monotonic()
        if not running or (seen_first is not None and time.monotonic() - seen_first > OTHERS_SECONDS):
            return root_cause([_failure(context, rank, code) for rank, code in failed.items()])
        time.sleep(POLL_SECONDS)


def _failure(context: SubprocessContext, rank: int, code: int) -> Failure:
    """What is known of a rank that ended with `code`."""
    try:
        written = json.loads(Path(context.error_files[rank]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        written = None
    return Failure(rank=rank, code=code, written=written, last_words=_tail(context.stderrs[rank]))


def _tail(path: str, lines: int = 12) -> str:
    try:
        return "\n".join(Path(path).read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except (OSError, ValueError):
        return ""


@contextmanager
def _store() -> Iterator[int]:
    """Serves the store at which ranks meet, as long as the context is open; gives its port."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = int(listener.getsockname()[1])
        # The store owns the descriptor it is given, and closes it.
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        try:
            yield port
        finally:
            del store


class _Asked:
    """Which signals came, in their order."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def take_note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)


@contextmanager
def _interruptible() -> Iterator[_Asked]:
    asked = _Asked()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

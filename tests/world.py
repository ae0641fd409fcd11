"""Runs a function on several forked ranks and brings back what they returned, or the first traceback."""

import gc
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[..., Any]


class RankError(AssertionError):
    """A rank raised; the text holds its traceback."""


def run_ranks(num_ranks: int, work: Work, *args: Any, timeout: float = 60, group_timeout: float = 40) -> list[Any]:
    """`work(*args)` on `num_ranks` forked processes that form a gloo process group; results by rank.

    Fails after `timeout` seconds. Forking takes a tenth of a second where a fresh interpreter takes nine.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        return _forked(num_ranks, partial(_be_rank, num_ranks, store, group_timeout, work, args), timeout)


def run_apart(num_ranks: int, work: Work, *args: Any, timeout: float = 60) -> list[Any]:
    """`work(rank, *args)` on forked processes that have no process group; results by rank."""
    return _forked(num_ranks, partial(_be_alone, work, args), timeout)


def _forked(num_ranks: int, be_rank: Callable[[int, Connection], None], timeout: float) -> list[Any]:
    ends, pids = [], []
    for rank in range(num_ranks):
        mine, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # What came with the fork need not be looked through again and again.
            mine.close()
            be_rank(rank, theirs)
        theirs.close()
        ends.append(mine)
        pids.append(pid)
    try:
        return _collect(ends, timeout)
    finally:
        for pid in pids:
            _end(pid)


def _be_alone(work: Work, args: tuple[Any, ...], rank: int, end: Connection) -> None:
    try:
        torch.set_num_threads(1)
        end.send_bytes(pickle.dumps((True, work(rank, *args))))
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        end.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
    finally:
        end.close()
        os._exit(0)


def _be_rank(
    num_ranks: int, store: str, group_timeout: float, work: Work, args: tuple[Any, ...], rank: int, end: Connection
) -> None:
    try:
        torch.set_num_threads(1)
        if num_ranks > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=group_timeout),
            )
        end.send_bytes(pickle.dumps((True, work(*args))))
        if num_ranks > 1:
            dist.barrier()  # what a rank sent last is still on its way when its work is done
    except BaseException:
        end.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
    finally:
        end.close()
        os._exit(0)


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(ends):
        ready = wait([end for end in ends if end not in results], timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            late = [rank for rank, end in enumerate(ends) if end not in results]
            raise RankError(f"ranks {late} did not finish within {timeout} s")
        for end in ready:
            try:
                good, value = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = False, f"rank {ends.index(end)} ended without a word"  # type: ignore[arg-type]
            if not good:
                raise RankError(value)
            results[end] = value  # type: ignore[index]
    return [results[end] for end in ends]


def _end(pid: int) -> None:
    """Waits a moment for a rank that is done, then ends it."""
    for _ in range(100):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

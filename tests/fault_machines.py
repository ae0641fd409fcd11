"""Machines for tests/faults.py: each is a forked process with torch's elastic agent, which forks the ranks.

The agent, its restarts and its store are torchrun's; no interpreter starts, so a run takes seconds. Each rank leaves
its process id in the folder of its machine.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import zero3d.cli.main
from tests import hosts

for needed in ("torch._dynamo", "torch.utils.tensorboard", "zero3d.train", "zero3d.cli.screen", "zero3d.cli.events"):
    import_module(needed)  # Once, before any fork.

SHUTDOWN = 3
"""Seconds that the agent gives a rank that it ends; torchrun's own are 30."""
PR_SET_PDEATHSIG = 1


class Machine:
    """A machine with `ranks` ranks of a run over `nodes` such machines. `folder`: where its ranks work; `host`: a test
    host, else it shares this machine's network; `preloaded`: for interpreters that start anew with this environment,
    which leave no process ids."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        endpoint: str,
        *,
        node: int = 0,
        nodes: int = 1,
        ranks: int = 2,
        restarts: int = 0,
        host: str = "",
        preloaded: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._node, self._ranks = folder, node, ranks
        self.host = host
        self._told = folder / f"told{node}"
        for rank in self.ranks:
            (folder / f"pid{rank}").unlink(missing_ok=True)
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._be(words, endpoint, nodes, restarts, host, preloaded)
            finally:
                os._exit(70)

    @property
    def ranks(self) -> range:
        return range(self._node * self._ranks, (self._node + 1) * self._ranks)

    def errors(self) -> list[str]:
        """What its ranks have told, each with its hint."""
        lines = self.told()
        return [" ".join(lines[at : at + 2]) for at, line in enumerate(lines) if line.startswith("zero3d: rank")]

    def told(self) -> list[str]:
        return self._told.read_text(errors="replace").splitlines() if self._told.exists() else []

    def pid(self, rank: int) -> int | None:
        """The process id of the rank; None: it has not started."""
        try:
            return int((self._folder / f"pid{rank}").read_text())
        except (OSError, ValueError):
            return None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, deadline: float) -> int | None:
        """The exit code; None: at `deadline` it had not ended."""
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._code

    def alive(self) -> list[int]:
        """Its ranks that have not ended."""
        return [rank for rank in self.ranks if (pid := self.pid(rank)) is not None and Path(f"/proc/{pid}").exists()]

    def end(self) -> None:
        """Nothing of it lives after this."""
        for pid in [] if self.poll() is not None else [*_below(self._pid), self._pid]:
            _kill(pid)
        for rank in self.alive():
            _kill(self.pid(rank) or 0)
        self.wait(time.monotonic() + 10)

    def _be(
        self,
        words: Sequence[str],
        endpoint: str,
        nodes: int,
        restarts: int,
        host: str,
        preloaded: Mapping[str, str] | None,
    ) -> None:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if host:
            hosts.enter(host, f"host{self._node}")
        output = os.open(self._told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A test runner has put files of its own in their places.
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.chdir(self._folder)
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(self._folder))
        os.environ.update({"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN)})
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if preloaded is not None:
            path = os.pathsep.join([str(self._folder), str(Path(__file__).parents[1])])
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self._ranks)]
            command = [*torchrun, "--standalone", "-m", "zero3d", *words]
            os.execve(sys.executable, command, {**os.environ, **preloaded, "PYTHONPATH": path})
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=self._ranks,
            run_id="faults",
            rdzv_backend="static",
            rdzv_endpoint=endpoint,
            rdzv_configs={"rank": self._node, "timeout": 60},
            local_addr=endpoint.partition(":")[0],
            max_restarts=restarts,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder / f"logs{self._node}")),
        )
        try:
            elastic_launch(config, _be_rank)(str(self._folder), list(words))
        except ChildFailedError:
            os._exit(1)
        os._exit(0)


def _below(pid: int) -> list[int]:
    """Processes that `pid` has started, and theirs."""
    try:
        children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [one for child in children for one in (*_below(child), child)]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _be_rank(folder: str, words: list[str]) -> None:
    """What `torchrun -m zero3d` runs."""
    mark = Path(folder) / f"pid{os.environ['RANK']}"
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # As in a new interpreter, not the agent's.
    sys.argv = ["zero3d", *words]
    try:
        zero3d.cli.main.entry()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        if end.code:
            os._exit(int(end.code))
    atexit._run_exitfuncs()


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"

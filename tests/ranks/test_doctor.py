"""`zero3d doctor`: really starts two ranks; says what is missing, and what to do, for machines that it is told of."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.command import ZERO3D
from zero3d.cli.diagnosis import Finding, abilities, findings
from zero3d.cli.doctor import CHECK, exit_code
from zero3d.cli.health import Facts, Gpu
from zero3d.offload.machine import Limit

GOOD = Facts(
    python=(3, 12, 1),
    system="Linux",
    versions={
        **dict.fromkeys(("zero3d", "numpy", "pydantic", "rich", "safetensors", "typer"), "1.0"),
        "torch": "2.11.0+cu130",
    },
    back_ends=("gloo", "nccl"),
    cuda="13.0",
    cores=16,
    native_bf16=True,
    memory=Limit(64 << 30, "memory available"),
    gpus=(Gpu(name="a GPU", memory=80 << 30, free=79 << 30),) * 2,
    interfaces={"lo": ("127.0.0.1",), "eth0": ("192.0.2.2",)},
    loopback="lo",
    across="eth0",
    shared_memory=32 << 30,
    temporary=32 << 30,
    here=32 << 30,
    compiler="cc",
)


def doctor(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*ZERO3D, "doctor", *words], capture_output=True, text=True, timeout=120, env=inherited)


@pytest.mark.cli
def test_two_ranks_meet() -> None:
    """stdout is one JSON object, progress is on stderr, and the ranks have added a tensor."""
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["possible"] and told["facts"]["versions"]["torch"] and "gloo" in told["facts"]["back_ends"]
    tried = next(one for one in told["findings"] if one["name"] == CHECK)
    assert tried["verdict"] == "good" and "gloo" in tried["value"]
    assert "starting 2 ranks" in done.stderr


@pytest.mark.cli
def test_the_screen_fits_and_names_what_is_missing() -> None:
    """Ranks of many machines would fail at an interface that is not there: it is told, and no reason to stop."""
    done = doctor("--no-check", GLOO_SOCKET_IFNAME="nosuch0")
    assert done.returncode == 0, done.stderr
    assert "nosuch0" in done.stdout and "Training is possible here." in done.stdout
    assert len(done.stdout.splitlines()) < 50


@pytest.mark.cli
def test_torch_that_cannot_be_loaded_is_a_finding() -> None:
    """A torch whose import raises, as with a broken CUDA library: no traceback, exit code 2, and what to do."""
    code = (
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise OSError('libcudart.so.13: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Broken())\n"
        "sys.argv[1:] = ['doctor']\n"
        "from zero3d.cli.main import entry\n"
        "entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "libcudart.so.13" in done.stdout and "pip install torch" in done.stdout
    assert "Training is not possible here yet: torch" in done.stdout and "Traceback" not in done.stderr


def test_a_good_machine_has_nothing_to_be_done() -> None:
    assert {one.verdict for one in findings(GOOD)} == {"good"} and not exit_code(findings(GOOD))
    able = {one.name: one.value for one in abilities(GOOD)}
    assert able["training"] == "2 ranks, one a GPU" and able["torch.compile"] == "yes"


@pytest.mark.parametrize(
    ("change", "name", "verdict", "todo"),
    [
        ({"python": (3, 10, 2)}, "Python", "bad", "3.11"),
        ({"versions": {**GOOD.versions, "torch": "2.9.1"}}, "torch", "bad", "torch>=2.11"),
        ({"torch_error": "OSError: libc"}, "torch", "bad", "pip install torch"),
        ({"versions": {"torch": "2.13.0"}}, "packages", "bad", "numpy"),
        ({"back_ends": ("gloo",)}, "back ends", "bad", "nccl"),
        ({"back_ends": (), "gpus": ()}, "back ends", "bad", "gloo"),
        ({"loopback": None}, "on one machine", "bad", "Bring lo up"),
        ({"cpu_quota": 2.0}, "cores", "note", "-n"),
        ({"memory": Limit(1 << 28, "cgroup limit")}, "memory", "note", "limit"),
        ({"gpus": ()}, "GPUs", "note", "nvidia-smi"),
        ({"gpus": (Gpu(name="a GPU", memory=80 << 30, free=8 << 30),)}, "GPU 0", "note", "nvidia-smi"),
        ({"shared_memory": 64 << 20}, "shared memory", "note", "--shm-size"),
        ({"temporary": 1 << 20}, "temporary files", "note", "Free"),
        ({"writable": False}, "this folder", "note", "run.out"),
        ({"across": "", "across_problem": "two interfaces\nSet one."}, "across machines", "note", "Set one."),
    ],
)
def test_each_trouble_has_a_way_out(change: dict[str, object], name: str, verdict: str, todo: str) -> None:
    found = findings(replace(GOOD, **change))  # type: ignore[arg-type]
    one = next(one for one in found if one.name == name)
    assert one.verdict == verdict and todo in one.todo
    assert exit_code(found) == (2 if verdict == "bad" else 0)
    assert all(one.todo for one in found if one.verdict != "good")


def test_what_is_not_installed_says_which_extra_brings_it() -> None:
    able = {one.name: one for one in abilities(replace(GOOD, native_bf16=False, compiler=None))}
    assert "zero3d[report]" in able["figures of zero3d report"].todo
    assert "zero3d[hf]" in able["Transformers models"].todo
    assert able["bf16"].verdict == able["torch.compile"].verdict == "note"


def test_ranks_that_cannot_meet_are_code_4() -> None:
    assert exit_code([*findings(GOOD), Finding(name=CHECK, value="gone", verdict="bad", todo="?")]) == 4

"""The examples run as their texts say, some with fewer steps.

examples/trainer.py is in test_trainer.py, the configurations in test_docs_commands.py.
"""

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.world import run_ranks

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = re.compile(r"^step +(\d+) +loss (\S+)", re.MULTILINE)


def on_rank(folder: Path, name: str, words: tuple[str, ...]) -> str:
    """What this rank prints."""
    os.chdir(folder)
    sys.argv = [name, *words]
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


def run(folder: Path, ranks: int, name: str, *words: str) -> str:
    """-> what rank 0 prints. Forked ranks, so that no interpreter has to start."""
    return run_ranks(ranks, on_rank, folder, name, words)[0]


def test_a_model_of_ones_own_has_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone, both = (LOSS.findall(run(tmp_path, ranks, "engine.py")) for ranks in (1, 2))
    assert len(alone) == 5
    assert alone == both
    assert float(alone[-1][1]) < 0.4


def test_a_loop_of_ones_own_learns(tmp_path: Path) -> None:
    said = run(tmp_path, 2, "own_loop.py", "--level", "3")
    assert float(re.findall(r"([\d.]+)% right", said)[0]) > 60  # Of four answers.


def test_what_one_layout_saved_another_goes_on_with(tmp_path: Path) -> None:
    """As an uninterrupted run, to the digits printed but the last."""
    first = run(tmp_path, 2, "resume.py", "--level", "3", "--until", "40")
    second = run(tmp_path, 4, "resume.py", "--pp", "2", "--level", "2", "--until", "80")
    assert "goes on from step 40: 4 ranks, level 2" in second
    whole = run(tmp_path, 1, "resume.py", "--until", "80", "--folder", "other")
    found, wanted = LOSS.findall(first) + LOSS.findall(second), LOSS.findall(whole)
    assert [step for step, _ in found] == [step for step, _ in wanted] == ["20", "40", "60", "80"]
    assert [float(loss) for _, loss in found] == pytest.approx([float(loss) for _, loss in wanted], rel=1e-5)


def test_fine_tuning_writes_what_transformers_loads(tmp_path: Path) -> None:
    whole = run(tmp_path, 2, "finetune.py", "--steps", "20")
    assert "192,960 parameters trained" in whole
    adapters = run(tmp_path, 2, "finetune.py", "--lora", "--steps", "20")
    assert "6,144 parameters trained" in adapters
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/finetune/base")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/finetune/model-2-ranks")
    assert not (base.lm_head.weight == tuned.lm_head.weight).all()
    assert any(
        "lora" in name
        for name, _ in PeftModel.from_pretrained(base, tmp_path / "runs/finetune/lora").named_parameters()
    )


def test_the_plan_of_a_large_model(tmp_path: Path) -> None:
    """With a small model and few devices: what is tested is the script."""
    script = (EXAMPLES / "plan.sh").read_text(encoding="utf-8")
    small = script.replace("llama3-70b", "gpt2").replace("--devices 512", "--devices 8").replace("1024", "16")
    assert small.count("zero3d ") == 2 and small != script
    done = subprocess.run(
        ["sh", "-c", small.replace("zero3d ", f"{sys.executable} -m zero3d ")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "One setting changed" in done.stdout and "level" in done.stdout

"""Fine-tunes a Transformers model from its files, all weights or LoRA adapters alone, and writes it for Transformers.

One rank:    python examples/finetune.py [--lora]
Two ranks:   torchrun --nproc-per-node 2 examples/finetune.py [--lora]
Your model:  torchrun --nproc-per-node 2 examples/finetune.py --model FOLDER    (config.json, safetensors, tokenizer)

Without --model it downloads nothing: it makes a small Llama, whose tokens are bytes. The text is Python's own source.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import zero3d

LENGTH = 96
GLOBAL_BATCH = 16


def small_llama(folder: Path) -> None:
    """Stands for a model that somebody has trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def batches(tokens: Tensor, steps: int, rank: int, world: int) -> Iterator[dict[str, Tensor]]:
    """This rank's part of each global batch."""
    for step in range(steps):
        at = torch.randint(0, len(tokens) - LENGTH, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
        whole = torch.stack([tokens[begin : begin + LENGTH] for begin in at.tolist()])
        yield {"input_ids": whole.chunk(world)[rank]}


def loss(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over next tokens, and their number."""
    return zero3d.cross_entropy(output.logits[:, :-1], batch["input_ids"][:, 1:])


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder as save_pretrained writes it")
    parser.add_argument("--lora", action="store_true", help="train adapters, and leave the weights as they are")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the small model's tensors are too small to be shared by threads

    folder = asked.model or asked.out / "base"
    if asked.model is None and int(os.environ.get("RANK", "0")) == 0 and not folder.is_dir():
        making = folder.with_name(f"base-{os.getpid()}")
        small_llama(making)
        making.rename(folder)  # whole at once: other ranks may be looking already
    while not folder.is_dir():
        time.sleep(0.1)  # rank 0 makes it
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    tokens = torch.tensor(list(text))
    if asked.model is not None:
        tokens = AutoTokenizer.from_pretrained(folder)(text.decode(), return_tensors="pt")["input_ids"][0]

    def build() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return model

    adapt: Callable[[nn.Module], nn.Module] | None = adapted if asked.lora else None
    config = {
        "run": {"steps": asked.steps},
        "zero": {"level": asked.level},
        "optimizer": {"lr": 5e-3, "schedule": "cosine"},
    }
    engine = zero3d.Engine(zero3d.pretrained(folder, build, adapt=adapt), loss, "adamw", config)
    for batch in batches(tokens, asked.steps, engine.rank, engine.world):
        report = engine.step(batch)
        if engine.rank == 0 and report.step % 20 == 0:
            print(f"step {report.step:3}  loss {report.loss:.4f}")

    trained = sum(one.numel for one in engine.parameters if one.trainable)
    held = engine.held_bytes()
    written = asked.out / ("lora" if asked.lora else f"model-{engine.world}-ranks")
    if asked.lora:
        with engine.gathered() as model:
            if engine.rank == 0:
                model.save_pretrained(written)  # type: ignore[operator]
    else:
        engine.export(written)
    if engine.rank == 0:
        print(f"{trained:,} parameters trained; each rank held optimizer {held['optimizer']} bytes; wrote {written}")
    engine.close()


if __name__ == "__main__":
    main()

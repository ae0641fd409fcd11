"""transformers.Trainer at ZeRO level 3: a small Llama learns to write Python, byte by byte. It downloads nothing.

One rank:   python examples/trainer.py
Two ranks:  torchrun --nproc-per-node 2 examples/trainer.py

Interrupt it, and start it again with --resume, on another number of ranks or at another --level.
"""

import argparse
import logging
import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from zero3d.integrations.transformers import Zero3dTrainer

LENGTH = 96
GLOBAL_BATCH = 16


def build() -> LlamaForCausalLM:
    """A byte is a token."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=2 * LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def samples(files: list[Path]) -> list[dict[str, Tensor]]:
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    return [{"input_ids": part, "labels": part} for part in text.split(LENGTH) if len(part) == LENGTH]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # these tensors are too small to be shared by threads
    logging.getLogger("transformers").setLevel(logging.ERROR)

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    held_out, text = files[:4], files[4:100]
    args = TrainingArguments(
        asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.1,
        logging_steps=25,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        save_total_limit=2,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Zero3dTrainer(
        build,  # a function: no rank ever holds the whole model
        args,
        train_dataset=samples(text),
        eval_dataset=samples(held_out)[:64],
        zero3d={"zero": {"level": asked.level}},
    )
    trainer.train(resume_from_checkpoint=asked.resume)
    trainer.save_model(f"{asked.out}/model")  # collective, as all of the Trainer's calls: on every rank

    held = trainer.engine.held_bytes()
    torch.manual_seed(0)
    prompt = torch.tensor([list(b"import ")], device=trainer.engine.device)
    with trainer.engine.gathered() as model:  # whole weights, plain torch
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True, top_k=5
        )
    if trainer.is_world_process_zero():
        print(f"each rank held weights {held['weights']} and optimizer {held['optimizer']} bytes")
        print(repr(bytes(written[0].tolist()).decode(errors="replace")))


if __name__ == "__main__":
    main()

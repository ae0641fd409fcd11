"""`transformers.Trainer` and Accelerate on sharded models, beside one plain process on the same global batches."""

import gc
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import zero3d
from tests.doc_blocks import blocks
from tests.world import run_ranks
from zero3d.integrations.accelerate import shard
from zero3d.integrations.checkpoints import newest_whole
from zero3d.integrations.transformers import Zero3dTrainer

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH = 64, 16
GLOBAL_BATCH = 8
STEPS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "level 1": {"zero": {"level": 1}},
    "level 2": {"zero": {"level": 2}},
    "level 3": {"zero": {"level": 3}},
    "level 2, optimizer on the host": {"zero": {"level": 2}, "offload": {"optimizer": "host"}},
    "level 3, all on the host": {"zero": {"level": 3}, "offload": {"optimizer": "host", "parameters": "host"}},
    "level 3, blocks recomputed": {"zero": {"level": 3}, "recompute": {"mode": "block"}},
}
Samples = list[dict[str, Tensor]]


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config())


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )


def samples(number: int, seed: int = 1, whole: bool = False) -> Samples:
    """Of each the first few targets are left out, unless `whole`: micro-batches have different numbers of them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: 0 if whole else int(torch.randint(0, LENGTH - 4, (), generator=generator))] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def arguments(folder: Path, turns: int = 2, **options: Any) -> TrainingArguments:
    """The global batch is always 8, in `turns` micro-batches a rank."""
    usual: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "save_strategy": "no",
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": GLOBAL_BATCH // (world() * turns),
        "per_device_eval_batch_size": GLOBAL_BATCH // world(),
        "gradient_accumulation_steps": turns,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**usual, **options})


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def as_torchrun() -> None:
    """What the launcher would say; Accelerate reads it, and finds the ranks met already."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # A Trainer collects garbage as it begins: in a fork that would copy all that was ever imported.
    if dist.is_initialized():
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world()), LOCAL_WORLD_SIZE=str(world()))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def history(trainer: Trainer) -> list[list[float]]:
    """Of each step loss, gradient norm and learning rate; of each evaluation its loss."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [[float(log[key]) for key in keys if key in log] for log in trainer.state.log_history]
    return [log for log in logs if len(log) > 1]


Result = tuple[list[list[float]], dict[str, Tensor]]


def plain(folder: Path) -> Result:
    as_torchrun()
    args = arguments(folder, eval_strategy="steps", eval_steps=3)
    trainer = Trainer(llama(), args, train_dataset=samples(20), eval_dataset=samples(16, 2, whole=True))
    trainer.train()
    assert trainer.model is not None
    return history(trainer), {name: value.clone() for name, value in trainer.model.state_dict().items()}


def sharded(folder: Path, settings: Sequence[dict[str, Any]]) -> list[Result]:
    as_torchrun()
    found = []
    for one in settings:
        args = arguments(folder, eval_strategy="steps", eval_steps=3)
        trainer = Zero3dTrainer(
            llama(), args, train_dataset=samples(20), eval_dataset=samples(16, 2, whole=True), zero3d=one
        )
        trainer.train()
        assert trainer.engine is not None
        found.append((history(trainer), trainer.engine.full_state_dict()))
        trainer.engine.close()
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A plain Trainer in one process: six steps of three windows each epoch, the last of them half as large."""
    result: Result = run_ranks(1, plain, tmp_path_factory.mktemp("plain"))[0]
    assert len(result[0]) == STEPS + 2
    return result


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    return len(found) == len(expected) and all(
        one == pytest.approx(other, rel=1e-5) for one, other in zip(found, expected)
    )


def test_losses_norms_rates_and_weights_are_those_of_a_plain_trainer(reference: Result, tmp_path: Path) -> None:
    """Close, as ranks add in another order. Levels that reduce alike are bit-equal, offloaded and recomputed too."""
    logs, weights = reference
    for results in run_ranks(2, sharded, tmp_path, list(SETTINGS.values())):
        for name, (found, state) in zip(SETTINGS, results):
            assert close(found, logs), (name, found, logs)
            assert state.keys() == weights.keys()
            for key, value in weights.items():
                torch.testing.assert_close(state[key], value, rtol=1e-5, atol=2e-6, msg=f"{name}: {key}")
                assert name == "level 1" or torch.equal(state[key], results[1][1][key]), (name, key)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == self.step
        return control


def interrupted(folder: Path, zero: dict[str, Any], turns: int, stop: int) -> list[list[float]]:
    """Until step `stop` (0: to the end), from the newest checkpoint if there is one."""
    as_torchrun()
    args = arguments(folder, turns, save_strategy="steps", save_steps=2)
    trainer = Zero3dTrainer(llama(seed=3 if stop == 0 else 0), args, train_dataset=samples(20), zero3d=zero)
    trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return history(trainer)


def test_a_training_is_resumed_on_other_ranks_and_at_another_level(reference: Result, tmp_path: Path) -> None:
    steps = [log for log in reference[0] if len(log) > 2]
    first = run_ranks(2, interrupted, tmp_path, SETTINGS["level 3"], 2, 3)[0]
    assert close(first, steps[:3])
    assert newest_whole(tmp_path).name == "checkpoint-2"
    # What a run left that was killed while it saved: they are passed over.
    (tmp_path / "checkpoint-3").mkdir()
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-5")
    piece = next((tmp_path / "checkpoint-5" / "zero3d").rglob("*.safetensors"))
    os.truncate(piece, piece.stat().st_size // 2)
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    second = run_ranks(1, interrupted, tmp_path, SETTINGS["level 1"], 4, 4)[0]
    assert close(second, steps[:4])
    third = run_ranks(2, interrupted, tmp_path, SETTINGS["level 2, optimizer on the host"], 2, 0)
    assert all(close(one, steps) for one in third)


class Told(TrainerCallback):
    """Writes down what a Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def whole_life(folder: Path, kind: type[Trainer], **options: Any) -> dict[str, Any]:
    """Evaluation first, training with the best model at the end, prediction, and the model saved for others."""
    as_torchrun()
    data = samples(16, 2, whole=True)
    told = Told()
    args = arguments(
        folder,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        greater_is_better=False,  # of random tokens there is nothing to learn: it is the first one
        metric_for_best_model="eval_loss",
    )
    trainer = kind(
        llama(),
        args,
        train_dataset=samples(20),
        eval_dataset=data,
        callbacks=[told],
        compute_metrics=lambda found: {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        **options,
    )
    before = trainer.evaluate()
    trainer.train()
    predicted = trainer.predict(data)  # type: ignore[arg-type]
    trainer.save_model(str(folder / "saved"))
    saved = LlamaForCausalLM.from_pretrained(folder / "saved")
    logits = saved(torch.stack([one["input_ids"] for one in data])).logits
    return {
        "events": told.events,
        "best": Path(trainer.state.best_model_checkpoint or "").name,
        "numbers": [before["eval_loss"], before["eval_right"], predicted.metrics["test_loss"]],
        "history": history(trainer),
        "predictions": torch.from_numpy(predicted.predictions),
        "saved": logits.detach(),
    }


def whole_life_sharded(folder: Path) -> dict[str, Any]:
    return whole_life(folder, Zero3dTrainer, zero3d={"zero": {"level": 3}})


def test_evaluation_prediction_callbacks_and_the_best_model_are_the_trainers(tmp_path: Path) -> None:
    expected = run_ranks(1, whole_life, tmp_path / "plain", Trainer)[0]
    for found in run_ranks(2, whole_life_sharded, tmp_path / "sharded"):
        assert found["events"] == expected["events"] and "on_pre_optimizer_step" in found["events"]
        assert found["best"] == expected["best"] == "checkpoint-2"
        assert found["numbers"] == pytest.approx(expected["numbers"], rel=1e-5)
        assert close(found["history"], expected["history"])
        torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["saved"], expected["predictions"], rtol=1e-5, atol=1e-5)
    files = list((tmp_path / "sharded").rglob("*.safetensors"))
    assert len(files) > 4
    for path in files:
        with safe_open(path, "pt") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
            assert shapes and not any(0 in shape for shape in shapes)


class Small(nn.Module):
    """No model of Transformers': its loss is a mean, whatever the other micro-batches have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def mean_of_means(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    return kind(small(), arguments(folder), train_dataset=samples(20, whole=True), **zero)


def label_smoothing(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    return kind(llama(), arguments(folder, label_smoothing_factor=0.2), train_dataset=samples(20), **zero)


def loss_of_ones_own(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
            num_items_in_batch
        )

    return kind(llama(), arguments(folder), train_dataset=samples(20), compute_loss_func=loss, **zero)


def optimizer_of_ones_own(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    """With groups, and a schedule that was made from it before the model was sharded."""
    model = llama()
    head = [model.lm_head.weight]
    rest = [one for one in model.parameters() if one is not head[0]]
    optimizer = torch.optim.SGD(
        [{"params": rest, "momentum": 0.9}, {"params": head, "lr": 0.03, "weight_decay": 0.1}], lr=0.1
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return kind(model, arguments(folder), train_dataset=samples(20), optimizers=(optimizer, schedule), **zero)


def optimizer_by_name(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    options = {"optim": "rmsprop", "lr_scheduler_type": "cosine", "warmup_steps": 0, "learning_rate": 1e-3}
    return kind(llama(), arguments(folder, **options), train_dataset=samples(20), **zero)


def activation_checkpointing(folder: Path, kind: type[Trainer], **zero: Any) -> Trainer:
    return kind(llama(), arguments(folder, gradient_checkpointing=True), train_dataset=samples(20), **zero)


Case = Callable[..., Trainer]
CASES: list[Case] = [
    mean_of_means,
    label_smoothing,
    loss_of_ones_own,
    optimizer_of_ones_own,
    optimizer_by_name,
    activation_checkpointing,
]


def plain_cases(folder: Path) -> list[list[list[float]]]:
    as_torchrun()
    return [trained_twice(case(folder, Trainer)) for case in CASES]


def sharded_cases(folder: Path, settings: dict[str, Any]) -> list[list[list[float]]]:
    as_torchrun()
    return [trained_twice(case(folder, Zero3dTrainer, zero3d=settings)) for case in CASES]


def trained_twice(trainer: Trainer) -> list[list[float]]:
    """The second training goes on with the optimizer of the first."""
    trainer.args.max_steps = 3
    trainer.train()
    first = history(trainer)
    trainer.args.max_steps = 1
    trainer.train()
    return first + history(trainer)


def test_what_a_trainer_is_told_of_losses_and_optimizers_holds_for_shards(tmp_path: Path) -> None:
    expected = run_ranks(1, plain_cases, tmp_path)[0]
    for found in run_ranks(2, sharded_cases, tmp_path, SETTINGS["level 3, all on the host"]):
        for case, one, other in zip(CASES, found, expected, strict=True):
            assert close(one, other), (case.__name__, one, other)


def built_on_ranks(folder: Path, weights: Path) -> list[tuple[list[list[float]], dict[str, Tensor]]]:
    """From files, no rank holding all of them; and from nothing but the seed."""
    as_torchrun()
    found = []
    for source in (zero3d.pretrained(weights, lambda: LlamaForCausalLM(llama_config())), llama):
        trainer = Zero3dTrainer(source, arguments(folder), train_dataset=samples(20), zero3d={"zero": {"level": 3}})
        assert trainer.engine is not None
        state = trainer.engine.full_state_dict()
        trainer.train()
        found.append((history(trainer), state))
    return found


def test_a_model_is_read_from_files_or_built_shard_by_shard(reference: Result, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "weights")
    on_one = run_ranks(1, built_on_ranks, tmp_path, tmp_path / "weights")[0]
    for (read, _), (drawn, state) in run_ranks(2, built_on_ranks, tmp_path, tmp_path / "weights"):
        assert close(read, [log for log in reference[0] if len(log) > 2])
        assert close(drawn, on_one[1][0]) and all(torch.equal(on_one[1][1][name], one) for name, one in state.items())


class Overflows(Zero3dTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("inf") if self.state.global_step == 2 and dist.get_rank() == 1 else loss


def overflowing(folder: Path) -> tuple[list[list[float]], bool]:
    as_torchrun()
    args = arguments(folder, logging_nan_inf_filter=True)
    trainer = Overflows(llama(), args, train_dataset=samples(20), zero3d={"precision": {"compute": "fp16"}})
    trainer.train()
    assert trainer.engine is not None
    return history(trainer), all(bool(one.isfinite().all()) for one in trainer.engine.full_state_dict().values())


def test_a_step_that_overflows_in_fp16_is_skipped_and_the_schedule_waits(tmp_path: Path) -> None:
    for found, finite in run_ranks(2, overflowing, tmp_path):
        assert finite
        assert [round(log[3], 6) for log in found] == [0.0, 0.005, 0.01, 0.01, 0.0075, 0.005]


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except zero3d.UsageError as error:
        return f"{error.message} | {error.hint}"
    return ""


def refused(folder: Path) -> list[str]:
    as_torchrun()

    def trained(zero: Any = None, model: Any = None, options: Any = None, **others: Any) -> Callable[[], object]:
        def work() -> object:
            args = arguments(folder, **(options or {}))
            return Zero3dTrainer(model or llama(), args, train_dataset=samples(8), zero3d=zero, **others).train()

        return work

    def unfrozen() -> object:
        model = llama()
        optimizer = torch.optim.AdamW([model.lm_head.weight])
        return trained(model=model, optimizers=(optimizer, None))()

    def apart() -> object:
        model = llama()
        groups = [{"params": [model.lm_head.weight]}, {"params": list(model.model.parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 1.0 / (step + 1)])
        return trained(model=model, optimizers=(optimizer, schedule))()

    def of_a_plain_trainer() -> object:
        args = arguments(folder, max_steps=1, save_strategy="steps", save_steps=1)
        Trainer(llama(), args, train_dataset=samples(8)).train()
        trainer = Zero3dTrainer(llama(), arguments(folder), train_dataset=samples(8))
        return trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))

    def fsdp() -> object:
        args = arguments(folder)
        args.fsdp = True
        return Zero3dTrainer(llama(), args, train_dataset=samples(8))

    toml = folder / "three.toml"
    toml.write_text("[zero]\nlevel = 3\n[parallel]\npp = 2\n", encoding="utf-8")
    return [
        told(work)
        for work in (
            fsdp,
            trained(options={"torch_compile": True}),
            trained(options={"auto_find_batch_size": True}),
            trained(options={"accelerator_config": {"even_batches": False}}),
            trained({"optimizer": {"lr": 1.0}}),
            trained({"parallel": {"micro_batch": 2}}),
            trained({"zero": {"stage": 3}}),
            trained(str(toml)),
            trained({"precision": {"compute": "bf16"}}, options={"bf16": True}),
            trained(options={"optim": "adafactor"}),
            unfrozen,
            apart,
            of_a_plain_trainer,
        )
    ]


def test_what_cannot_be_honoured_is_refused_with_a_way_out(tmp_path: Path) -> None:
    words = ["fsdp", "torch_compile", "auto_find_batch_size", "even_batches", "learning_rate", "gradient_accumulation"]
    words += ["zero.level", "zero3d.Engine", "both set", "whole_parameters", "Freeze", "went apart", "from_pretrained"]
    for text, word in zip(run_ranks(1, refused, tmp_path)[0], words, strict=True):
        assert word in text, text


def accelerated(level: int | None) -> tuple[list[list[float]], str]:
    """A loop of Accelerate's; `level` None: as one would write it without zero3d."""
    as_torchrun()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2 * world(), 0.5)  # Accelerate steps it once a process
    loader = DataLoader(samples(24, whole=True), batch_size=4 // world())  # type: ignore[arg-type, var-annotated]
    sharded = None
    if level is not None:
        sharded = shard(accelerator, model, optimizer, level=level)
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for batch in list(loader) * 2:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = sharded.clip_grad_norm_(0.5) if sharded else accelerator.clip_grad_norm_(model.parameters(), 0.5)
                mean = accelerator.gather(loss.detach()).mean()
                found.append([float(mean), float(norm), scheduler.get_last_lr()[0]])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found, told(lambda: accelerator.save_state("nowhere")) if sharded else ""


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_loop_of_accelerates_gives_the_numbers_of_one_process(level: int) -> None:
    expected, _ = run_ranks(1, accelerated, None)[0]
    for found, refusal in run_ranks(2, accelerated, level):
        assert len(found) == 6 and close(found, expected)
        assert "full_state_dict" in refusal


def misprepared() -> list[str]:
    as_torchrun()
    accelerator = Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = accelerator.prepare(llama())
    return [
        told(lambda: shard(accelerator, prepared)),
        told(lambda: shard(accelerator, model, accelerator.prepare(optimizer))),
    ]


def unjoined() -> list[str]:
    """Each process of Accelerate's is alone, where it looks for GPUs and there are none."""
    return [
        told(lambda: shard(Accelerator(), llama())),
        told(lambda: Zero3dTrainer(llama(), TrainingArguments("nowhere", report_to="none"))),
    ]


def in_bf16() -> list[str]:
    as_torchrun()
    return [told(lambda: shard(Accelerator(cpu=True, mixed_precision="bf16"), llama()))]


def test_what_accelerate_would_do_twice_or_not_at_all_is_refused() -> None:
    assert all("Shard first" in text for text in run_ranks(2, misprepared)[0])
    assert all("2 processes were started" in text for text in run_ranks(2, unjoined)[0])
    assert "precision" in run_ranks(1, in_bf16)[0][0]


class Sequences(Zero3dTrainer, Seq2SeqTrainer):
    pass


def translated(folder: Path, kind: type[Seq2SeqTrainer], **zero: Any) -> tuple[list[list[float]], float, Tensor]:
    as_torchrun()
    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    usual = arguments(folder, max_steps=3).to_dict()
    names = ("use_cpu", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps")
    args = Seq2SeqTrainingArguments(
        str(folder),
        predict_with_generate=True,
        generation_max_length=6,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        learning_rate=0.05,  # until it says something else than what it began with
        **{name: usual[name] for name in names},
    )
    trainer = kind(T5ForConditionalGeneration(config), args, train_dataset=samples(20), **zero)
    trainer.train()
    found = trainer.predict(samples(16, 2))  # type: ignore[arg-type]
    assert found.metrics is not None
    return history(trainer), found.metrics["test_loss"], torch.from_numpy(found.predictions)


def translated_sharded(folder: Path) -> tuple[list[list[float]], float, Tensor]:
    return translated(folder, Sequences, zero3d={"zero": {"level": 3}})


def test_a_seq2seq_trainer_trains_and_generates_as_it_does_under_ddp(tmp_path: Path) -> None:
    """Both on two ranks: a Trainer's loss of a model that averages by itself hangs on their number."""
    plainly = run_ranks(2, translated, tmp_path, Seq2SeqTrainer)
    for (logs, loss, tokens), found in zip(plainly, run_ranks(2, translated_sharded, tmp_path)):
        assert close(found[0], logs) and found[1] == pytest.approx(loss, rel=1e-5)
        assert torch.equal(found[2], tokens) and len(tokens.unique()) > 1


def adapted(folder: Path, kind: type[Trainer], **zero: Any) -> tuple[list[list[float]], set[str]]:
    as_torchrun()
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    args = arguments(folder, save_strategy="steps", save_steps=3)
    trainer = kind(model, args, train_dataset=samples(20), **zero)
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    return history(trainer), {path.name for path in (folder / "adapter").glob("*.safetensors")}


def adapted_sharded(folder: Path) -> tuple[list[list[float]], set[str]]:
    return adapted(folder, Zero3dTrainer, zero3d={"zero": {"level": 3}})


def test_an_adapter_is_trained_and_saved_alone(tmp_path: Path) -> None:
    expected = run_ranks(1, adapted, tmp_path / "plain", Trainer)[0]
    for logs, files in run_ranks(2, adapted_sharded, tmp_path / "sharded"):
        assert close(logs, expected[0]) and files == expected[1] == {"adapter_model.safetensors"}


PAGE = blocks("trainer.md")


def fragments_of_the_page(folder: Path) -> int:
    """In order, after the program above them."""
    os.chdir(folder)
    as_torchrun()
    names = runpy.run_path("finetune.py", run_name="__main__")
    fragments = [block for block in PAGE if block.language == "python" and not block.title]
    for block in fragments:
        exec(compile(block.text, f"trainer.md:{block.line}", "exec"), names)
    return len(fragments)


def program(name: str, folder: Path, *options: str) -> None:
    os.chdir(folder)
    as_torchrun()
    sys.argv = [name, *options]
    runpy.run_path(name, run_name="__main__")


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    files = {block.title: block.text for block in PAGE if block.title}
    assert set(files) == {"finetune.py", "sharded.toml", "accelerated.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [line for block in PAGE if block.language == "sh" for line in block.commands]
    assert lines == [
        'pip install "zero3d[hf]"',
        "python finetune.py",
        "torchrun --nproc-per-node 2 finetune.py",
        "python accelerated.py",
        "torchrun --nproc-per-node 2 accelerated.py",
    ]
    run_ranks(1, program, "finetune.py", tmp_path)
    assert run_ranks(2, fragments_of_the_page, tmp_path)[0] == 4  # finetune.py first
    for ranks in (1, 2):
        run_ranks(ranks, program, "accelerated.py", tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000


def test_the_example_trains_and_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "trainer.py")
    run_ranks(2, program, example, tmp_path, "--steps", "2")
    run_ranks(1, program, example, tmp_path, "--steps", "3", "--level", "1", "--resume")
    assert newest_whole(tmp_path / "runs" / "trainer").name == "checkpoint-3"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "trainer" / "model").lm_head.weight.isfinite().all()

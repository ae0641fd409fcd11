"""The loop: batch, step, tell; then what was learned and what was held.

Runs on every rank. All that people or programs see of it goes through `Listener`s, on rank 0 alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from zero3d.alike import refuse_other_tokens
from zero3d.checkpoint.fit import listed
from zero3d.checkpoint.load import Loaded
from zero3d.checkpoint.place import Url
from zero3d.config import Config
from zero3d.data.batches import Batches, heldout_batches, num_windows
from zero3d.data.byte_models import bits_per_byte
from zero3d.data.prepare import Prepared
from zero3d.data.tokenizers import BYTES, Tokenizer, tokenizer_for
from zero3d.engine import Engine
from zero3d.errors import UsageError
from zero3d.everyone import Everyone
from zero3d.layout import AXES, Layout
from zero3d.mfu import Mfu
from zero3d.models.gpt import generate
from zero3d.offload.budget import MachineNeed
from zero3d.planner import bubble
from zero3d.planner.memory import ModelStates, at_each_level
from zero3d.reports import StepReport
from zero3d.resuming import Checkpoints
from zero3d.stopping import Asked, Nobody, Stopped
from zero3d.tensor.loss import next_token_loss
from zero3d.trace.tracer import Tracer
from zero3d.watching.notice import Notice
from zero3d.watching.watch import RanksReport, Watch

HELDOUT_TOKENS = 1 << 17
"""Held-out tokens that are evaluated, at most: enough for the third digit, little beside the training."""
LAST_STEPS = 20
"""`train_loss` is the mean over this many last steps, as one batch's loss is noisy."""
PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 64, 200, 0.7


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run, known before the first step. parameters, trainable: of the whole model; by index on pp:
    predicted: model states of its ranks at levels 0 to 3; stages: the blocks of each of its stages. first_step: how
    many were made before; resumed: from which checkpoint, and which ones could not be used. host_memory: what offload
    takes of each machine, and the same as a text; empty without."""

    config: Config
    world: int
    device: str
    parameters: int
    trainable: int
    dtypes: Sequence[tuple[str, str]]
    predicted: Sequence[Sequence[ModelStates]]
    stages: Sequence[Sequence[range]]
    train_tokens: int
    train_bytes: int | None
    heldout_windows: int
    documents: int
    vocabulary: int
    notice: str
    first_step: int = 0
    resumed: str = ""
    host_needs: Sequence[MachineNeed] = ()
    host_memory: str = ""

    @property
    def bits_per_nat(self) -> float | None:
        """Bits per byte of text that a loss of one nat per token is; None: nobody knows the text's bytes."""
        return self.train_tokens / self.train_bytes / math.log(2) if self.train_bytes else None


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Bits per byte of text; `orders`: what byte models of order 0 and 2 spend on the held-out text."""

    train: float
    heldout: float
    orders: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What came out. Losses are in nats per counted target; bytes are by kind or axis, then by rank. offload: what a
    step's seconds went into, the mean over steps; None without offload."""

    plan: Plan
    steps: int
    seconds: float
    train_loss: float
    """The mean over the last `last_steps` steps."""
    last_steps: int
    heldout_loss: float
    bits: Bits | None
    tokens_per_second: float
    held_bytes: dict[str, list[int]]
    sent_bytes: dict[str, list[int]]
    offload: dict[str, float] | None
    prompt: str
    sample: str
    trace: Path | None
    checkpoint: Path | Url | None


class Listener(Protocol):
    """Someone who is told how the run goes."""

    def started(self, plan: Plan) -> None: ...

    def stepped(self, report: StepReport) -> None: ...

    def noticed(self, notice: Notice) -> None:
        """After the step that it is of."""
        ...

    def compared(self, ranks: RanksReport) -> None:
        """Now and then, after a step."""
        ...

    def working_on(self, what: str) -> None:
        """The steps are done; what takes time now."""
        ...

    def done(self, summary: Summary) -> None: ...

    def stopped(self, stopped: Stopped) -> None:
        """In place of `done`: somebody asked the run to end."""
        ...

    def close(self) -> None:
        """However the run ends."""
        ...


def train(
    config: Config,
    prepared: Prepared,
    build: Callable[[], nn.Module],
    listeners: Sequence[Listener],
    traced_steps: int = 0,
    resume: bool = False,
    asked: Asked | None = None,
    *,
    allow_missing: bool = False,
) -> Summary | Stopped:
    """Trains as `config` says, and traces so many steps. Every rank calls it; rank 0 tells the listeners and has the
    sample. Once a rank was `asked` to end, all of them save a checkpoint of the step under way and leave.

    resume: from the newest checkpoint of run.out, where there is one; allow_missing: as `Engine.load` has it."""
    asked = asked or Nobody()
    # Every key as one that was set: the batches are ours, of the size that even a silent default says.
    whole = Config.load(config.model_dump())
    engine = Engine(build, next_token_loss, config.optimizer.name, whole)
    everyone = Everyone(listeners if engine.rank == 0 else ())
    try:
        checkpoints = Checkpoints(engine)
        refuse_other_tokens(engine, prepared)
        checkpoints.refuse_own(resume=resume)
        loaded = checkpoints.resume(allow_missing=allow_missing) if resume else None
        checkpoints.begin(loaded)
        plan = _plan(engine, prepared, loaded, resume=resume)
        everyone.started(plan)
        batches = Batches(
            prepared.train,
            plan.config.data.sequence_length,
            plan.config.data.global_batch,
            plan.config.run.seed,
        )
        steps = range(plan.first_step, plan.config.num_steps)
        tracer = Tracer(engine, Path(plan.config.run.out), traced_steps, steps)
        layout = Layout(**{axis: getattr(plan.config.parallel, axis) for axis in AXES})
        watch = Watch(engine.aside, layout, engine.rank, engine.device, asked)
        mfu = Mfu(plan.config, plan.trainable, plan.world, engine.device, dict(plan.dtypes).get("weights", ""))
        reports = []
        with asked.listening():
            for step in steps:
                batch = batches.batch(step, engine.dp_index, engine.dp_size)
                watch.tell()
                with tracer.step(step) as watcher:
                    made = engine.step(batch, watch.beside(watcher))
                report = replace(made, mfu=mfu.of(made.tokens, made.seconds))
                reports.append(report)
                everyone.stepped(report, *watch.stepped(report))
                checkpoints.stepped(step + 1, last=step + 1 == steps.stop)
                if watch.stop:
                    break
            summary = _look_back(engine, prepared, plan, reports, everyone, watch, tracer.written, checkpoints.last)
            if summary is None:
                assert watch.stop is not None, "or there is a summary"
                stopped = checkpoints.stop(reports[-1].step, steps.stop, watch.stop)
                everyone.stopped(stopped)
                return stopped
        everyone.done(summary)
        return summary
    finally:
        everyone.close()
        engine.close()


def _plan(engine: Engine, prepared: Prepared, loaded: Loaded | None, *, resume: bool) -> Plan:
    config, infos = engine.config, engine.parameters
    if loaded is not None and loaded.step >= config.num_steps:
        raise UsageError(
            f"{loaded.path} is of step {loaded.step}, and there are {config.num_steps} steps in all",
            hint="Set run.steps (or run.stop_after) to more.",
        )
    parameters = sum(info.numel for info in infos)
    trained = sum(info.numel for info in infos if info.trainable)
    stages, length = engine.stages, config.data.sequence_length
    place = config.checkpoint.folder or config.run.out
    begins = f"There is no checkpoint in {place}: the run begins anew." if resume and loaded is None else ""
    return Plan(
        config=config,
        world=engine.world,
        device=str(engine.device),
        parameters=parameters,
        trainable=trained,
        dtypes=engine.dtype_plan(),
        predicted=[_predicted(engine, pp) for pp in range(config.parallel.pp)],
        stages=[stages.blocks_of(pp) for pp in range(config.parallel.pp)],
        train_tokens=len(prepared.train),
        train_bytes=prepared.train_bytes,
        heldout_windows=min(num_windows(prepared.heldout, length), max(HELDOUT_TOKENS // length, 1)),
        documents=prepared.documents,
        vocabulary=prepared.vocabulary,
        notice=" ".join(filter(None, (begins, engine.notice, bubble.notice(config)))),
        first_step=loaded.step if loaded else 0,
        resumed=_resumed(loaded) if loaded else "",
        host_needs=engine.host_needs,
        host_memory=engine.host_memory,
    )


def _resumed(loaded: Loaded) -> str:
    skipped = f"; not used: {'; '.join(loaded.skipped)}" if loaded.skipped else ""
    allowed = (("not in it", loaded.missing), ("left out", loaded.unexpected))
    parts = "".join(f"; {what}: {listed(names)}" for what, names in allowed if names)
    return (
        f"{loaded.path} (step {loaded.step:,}: {loaded.params} parameters, {loaded.moments} optimizer states, "
        f"{loaded.buffers} buffers){skipped}{parts}"
    )


def _predicted(engine: Engine, pp: int) -> list[ModelStates]:
    """Of ranks with this index on pp."""
    held = [info.local for info in engine.parameters if pp in engine.stages.ranks_of(info.name)]
    trained, frozen = (sum(info.numel for info in held if info.trainable is kind) for kind in (True, False))
    return at_each_level(engine.config, trained, engine.dp_size, frozen)


def _look_back(
    engine: Engine,
    prepared: Prepared,
    plan: Plan,
    reports: Sequence[StepReport],
    everyone: Everyone,
    watch: Watch,
    trace: Path | None,
    checkpoint: Path | Url | None,
) -> Summary | None:
    """What was held and sent by the last step, and what was learned; None: the run is to end at once."""
    if watch.stop:
        return None
    held, sent = engine.held_bytes(), engine.sent_bytes()
    everyone.working_on("reading held-out text")
    heldout_loss = _evaluate(engine, prepared, plan, watch)
    if watch.stop:
        return None
    everyone.working_on("writing a sample")
    prompt, sample = _sample(engine, prepared)
    last, timed = reports[-LAST_STEPS:], reports[1:] or reports
    train_loss = sum(one.loss * one.tokens for one in last) / sum(one.tokens for one in last)
    everyone.working_on("counting bytes")
    return Summary(
        plan=plan,
        steps=plan.first_step + len(reports),
        seconds=sum(one.seconds for one in reports),
        train_loss=train_loss,
        last_steps=len(last),
        heldout_loss=heldout_loss,
        bits=_bits(prepared, plan, train_loss, heldout_loss) if engine.rank == 0 else None,
        tokens_per_second=sum(one.tokens for one in timed) / sum(one.seconds for one in timed),
        held_bytes=held,
        sent_bytes=sent,
        offload=_mean([one.split for one in timed if one.split is not None]),
        prompt=prompt,
        sample=sample,
        trace=trace,
        checkpoint=checkpoint,
    )


def _mean(splits: Sequence[dict[str, float]]) -> dict[str, float] | None:
    return {name: sum(one[name] for one in splits) / len(splits) for name in splits[0]} if splits else None


def _evaluate(engine: Engine, prepared: Prepared, plan: Plan, watch: Watch) -> float:
    """Mean loss over the held-out windows, which the ranks share; of the first of them where the run is to end."""
    config = plan.config
    total = tokens = 0.0
    micro_batch = config.parallel.micro_batch
    assert micro_batch is not None, "resolved"
    for batch in heldout_batches(
        prepared.heldout,
        config.data.sequence_length,
        micro_batch,
        plan.heldout_windows,
        engine.dp_index,
        engine.dp_size,
    ):
        watch.tell()
        report = engine.evaluate(batch)
        total += report.loss * report.tokens
        tokens += report.tokens
        if watch.stop:
            break
    return total / tokens


def _sample(engine: Engine, prepared: Prepared) -> tuple[str, str]:
    """The beginning of the held-out text, and how the model goes on from there."""
    tokenizer = tokenizer_for(engine.config.data.tokenizer)
    prompt = _to_a_gap(np.asarray(prepared.heldout[:PROMPT_TOKENS]).astype(np.int64), tokenizer)
    with engine.gathered() as model:
        if engine.rank != 0:
            return "", ""
        tokens = generate(
            lambda ids: model(tokens=ids),
            torch.from_numpy(prompt)[None].to(engine.device),
            SAMPLE_TOKENS,
            sequence_length=engine.config.data.sequence_length,
            temperature=TEMPERATURE,
            generator=torch.Generator(engine.device).manual_seed(engine.config.run.seed),
        )
    return tokenizer.decode(prompt), tokenizer.decode(tokens[0, len(prompt) :].cpu().numpy())


def _to_a_gap(tokens: npt.NDArray[np.int64], tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """The tokens up to the last that ends in white space; all where none does."""
    for length in range(len(tokens), 0, -1):
        if tokenizer.decode(tokens[length - 1 : length])[-1:].isspace():
            return tokens[:length]
    return tokens


def _bits(prepared: Prepared, plan: Plan, train_loss: float, heldout_loss: float) -> Bits | None:
    """Losses as bits per byte; None where it is not known how many bytes the tokens stand for."""
    if not prepared.train_bytes or not prepared.heldout_bytes:
        return None
    nats = math.log(2)
    orders: dict[int, float] = {}
    if prepared.tokenizer == BYTES:
        seen = plan.heldout_windows * plan.config.data.sequence_length + 1
        orders = bits_per_byte(np.asarray(prepared.train), np.asarray(prepared.heldout[:seen]))
    return Bits(
        train=train_loss / nats * len(prepared.train) / prepared.train_bytes,
        heldout=heldout_loss / nats * len(prepared.heldout) / prepared.heldout_bytes,
        orders=orders,
    )

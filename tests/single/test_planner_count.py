"""What is counted of a model that runs on tensors without data: exactly what it computes, keeps and sends.

Numbers are compared with formulas of the papers and with what the same model does on real tensors; all are equal, not
close.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from zero3d.config import Parallel
from zero3d.dryrun.count import Subject, count
from zero3d.errors import ConfigError, UsageError
from zero3d.models.gpt import GPT, GPTConfig
from zero3d.models.llama import Llama, LlamaConfig
from zero3d.planner.workload import Part, Workload
from zero3d.tensor.loss import next_token_loss

T, C, V, LAYERS = 64, 128, 500, 3


def tokens(samples: int) -> dict[str, Tensor]:
    return {"tokens": torch.zeros(samples, T, dtype=torch.long), "targets": torch.zeros(samples, T, dtype=torch.long)}


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=V, sequence_length=T, width=C, layers=LAYERS, heads=4))


def llama(layers: int = LAYERS) -> nn.Module:
    config = LlamaConfig(vocabulary=V, sequence_length=T, width=C, layers=layers, heads=8, kv_heads=2, mlp_width=320)
    return Llama(config)


def counted(build: Callable[[], nn.Module] = gpt, **options: Any) -> Workload:
    return count(Subject(build=build, batch=tokens, tokens=T), memory=False, **options)


def flops(part: Part) -> tuple[float, float]:
    """(of the forward, of the backward) of one sample."""
    return part.forward.flops(1), part.backward.flops(1) + sum(one.flops(1) for one in part.weights)


def test_flops_are_those_of_the_papers() -> None:
    """24 T C^2 + 4 T^2 C a block (Narayanan et al. 2021, appendix), 2 T C V of the head; backwards are twice that."""
    workload = counted()
    assert flops(workload.kinds[0]) == (24 * T * C**2 + 4 * T**2 * C, 2 * (24 * T * C**2 + 4 * T**2 * C))
    assert flops(workload.after) == (2 * T * C * V, 4 * T * C * V)
    # A causal mask leaves half of the scores, and the backward makes them once more.
    assert workload.kinds[0].forward.fused_done == 2 * T**2 * C
    assert workload.kinds[0].backward.fused_done == 5 * T**2 * C


def test_parameters_are_the_models_each_where_it_is_first_used() -> None:
    for build in (gpt, llama):
        workload, model = counted(build), build()
        assert workload.numel == workload.trained == sum(one.numel() for one in model.parameters())
        assert workload.order == [0] * LAYERS
        assert [one.name for one in workload.kinds[0].parameters] == [
            name for name, _ in model.get_submodule("blocks.0").named_parameters()
        ]
    tied = counted(gpt)
    assert [one.name for one in tied.before.parameters] == ["embedding.weight"]
    assert [one.name for one in tied.after.borrowed] == ["embedding.weight"]
    assert (tied.before.multiplied, tied.after.multiplied) == (0, V * C + C)


def test_what_autograd_keeps_is_what_it_keeps_of_real_tensors() -> None:
    """Of the whole model: the embedding, each block, the head and the loss."""
    model = llama()

    def kept(samples: int) -> int:
        batch = tokens(samples)
        seen = {one.untyped_storage().data_ptr(): 0 for one in (*model.parameters(), *model.buffers())}

        def pack(tensor: Tensor) -> Tensor:
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = next_token_loss(model(batch["tokens"]), batch)
        assert loss.requires_grad
        return sum(seen.values())

    workload = counted(llama, dtype="fp32")
    for samples in (1, 2, 5):
        assert sum(part.saved.of(samples) for part in workload.parts) == kept(samples)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tensor_parallel_rank_has_its_part(sequence_parallel: bool) -> None:
    whole, part = counted(), counted(tp=2, sequence_parallel=sequence_parallel)
    assert sum(flops(part.kinds[0])) * 2 == sum(flops(whole.kinds[0]))
    assert part.kinds[0].saved.of(1) < whole.kinds[0].saved.of(1)
    calls = part.kinds[0].forward.calls
    assert {call.num_bytes.of(3) for call in calls} == {3 * T * C * 2}
    pairs = ["all_gather", "reduce_scatter"] * 2 if sequence_parallel else ["all_reduce"] * 2
    assert [call.verb for call in calls] == pairs
    assert part.kinds[0].leaving.of(1) == T * C * 2 / (2 if sequence_parallel else 1)
    # Gradients of weights are computed while the input's gradient is summed.
    assert any(call.behind for call in part.kinds[0].backward.calls)
    assert not any(call.behind for call in calls)


def test_amounts_grow_with_the_samples() -> None:
    """A micro-batch of three is what three samples say, whatever part of it is fixed."""
    workload = count(Subject(build=gpt, batch=lambda samples: tokens(3 * samples), tokens=T), memory=False)
    one = counted()
    for three, single in zip(workload.parts, one.parts, strict=True):
        assert three.saved.of(1) == single.saved.of(3)
        assert three.forward.moved.of(1) == single.forward.moved.of(3)
        assert three.backward.moved.of(1) == single.backward.moved.of(3)
        assert three.forward.flops(1) == single.forward.flops(3)


class Mixed(nn.Module):
    """Blocks of two kinds in turn, in a list of which each index is named."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(8 * (1 + at % 2)) for at in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for at in range(6):
            x = self.blocks[at](x)
        return x


class Gated(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, inner), nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def test_blocks_of_each_kind_count_once_and_all_run_where_the_model_needs_all() -> None:
    subject = Subject(build=Mixed, batch=lambda samples: torch.zeros(samples, 16), tokens=1, loss=mean)
    workload = count(subject, dtype="fp32", memory=False)
    assert workload.order == [0, 1, 0, 1, 0, 1]
    assert workload.numel == sum(one.numel() for one in Mixed().parameters())
    # The first block's input needs no gradient in this model; that of all others does.
    small, large = (kind.backward.flops(1) for kind in workload.kinds)
    assert (small, large) == (2 * 2 * 16 * 8, 2 * 2 * 16 * 16)


def test_attention_that_is_no_operation_of_its_own_counts_apart() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(C, 3 * C)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    subject = Subject(build=Scores, batch=lambda samples: torch.zeros(samples, T, C), tokens=T, loss=mean)
    part = count(subject, dtype="fp32", memory=False).before
    assert sum(one.flops(1) for one in part.forward.attention) == 4 * T * T * C
    assert sum(one.flops(1) for one in part.backward.attention) == 8 * T * T * C
    scores = 4 * T * T * 4
    # The softmax keeps its result; both products touch scores, and are counted as products.
    assert part.attention_saved.of(1) == scores
    assert part.forward.attention_moved.of(1) == 2 * scores


def test_models_of_transformers_count_as_they_are() -> None:
    config = transformers.LlamaConfig(
        hidden_size=C,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=320,
        vocab_size=V,
        use_cache=False,
    )

    def build() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    def batch(samples: int) -> dict[str, Tensor]:
        return {"input_ids": torch.zeros(samples, T, dtype=torch.long)}

    subject = Subject(build=build, batch=batch, tokens=T)
    workload, own = count(subject, memory=False), counted(llama)
    assert workload.numel == sum(one.numel() for one in build().parameters())
    assert [flops(part) for part in workload.parts] == [flops(part) for part in own.parts]
    half = count(subject, tp=2, memory=False)
    assert sum(flops(half.kinds[0])) * 2 == sum(flops(workload.kinds[0]))


def test_large_models_are_never_made() -> None:
    """70e9 parameters: 140 GB."""
    config = LlamaConfig(
        vocabulary=128256, sequence_length=4096, width=8192, layers=80, heads=64, kv_heads=8, mlp_width=28672
    )

    def batch(samples: int) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(samples, 4096, dtype=torch.long)}

    workload = count(
        Subject(build=lambda: Llama(config), batch=batch, tokens=4096), tp=8, sequence_parallel=True, memory=False
    )
    assert 8.8e9 < workload.numel < 8.9e9
    assert len(workload.blocks) == 80


def test_models_that_cannot_be_counted_are_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(UsageError, match="needs the values"):
        count(Subject(build=Looks, batch=lambda n: torch.zeros(n, 4), tokens=1, loss=mean), dtype="fp32")
    with pytest.raises(ConfigError, match="no plan"):
        count(Subject(build=Mixed, batch=lambda n: torch.zeros(n, 16), tokens=1, loss=mean), parallel=Parallel(), tp=2)

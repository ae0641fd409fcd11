"""The bundled GPT, its loss and sampling."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero3d.initial import draw
from zero3d.models import losses
from zero3d.models.gpt import GPT, GPTConfig, generate
from zero3d.models.losses import next_token_loss

SMALL = GPTConfig(vocabulary=50, sequence_length=16, width=32, layers=2, heads=2)


def small(**changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(SMALL), **changes}))


def test_logits_have_the_shape_of_the_vocabulary() -> None:
    model = small()
    assert model(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 50)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 50)
    assert isinstance(model.blocks, nn.ModuleList) and len(model.blocks) == 2


def test_later_tokens_do_not_influence_earlier_logits() -> None:
    model = small()
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_earlier_tokens_and_their_order_do_influence() -> None:
    model = small()
    with torch.no_grad():
        for block in model.blocks:  # at first attention is too flat for an order to show
            block.attention.qkv.weight.mul_(20)
    tokens = torch.randint(50, (1, 16))
    swapped = tokens.clone()
    swapped[0, 2], swapped[0, 3] = 7, 8
    other = tokens.clone()
    other[0, 2], other[0, 3] = 8, 7
    assert (model(swapped)[0, -1] - model(other)[0, -1]).abs().max() > 1e-4


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = small(), small(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (tied, untied)]
    assert sizes == [50 * 32 + 2 * (12 * 32 * 32 + 2 * 32) + 32, 2 * 50 * 32 + 2 * (12 * 32 * 32 + 2 * 32) + 32]


def test_initial_weights_are_scaled_by_depth() -> None:
    model = small(width=64, layers=8)
    tokens = torch.randint(50, (4, 17))
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(1 / 32, rel=0.05)
    assert model.blocks[7].attention.out.weight.std().item() == pytest.approx(1 / 32, rel=0.05)
    total, count = next_token_loss(model(tokens[:, :-1]), {"targets": tokens[:, 1:]})
    assert (total / count).item() == pytest.approx(math.log(50), abs=0.8)


def test_every_module_with_weights_or_buffers_can_reset_them() -> None:
    for module in small().modules():
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            assert callable(getattr(module, "reset_parameters", None)), type(module).__name__


def test_a_model_on_meta_starts_as_one_built_by_its_function() -> None:
    with torch.device("meta"):
        on_meta = draw(GPT(SMALL), seed=3)
    built = draw(lambda: GPT(SMALL), seed=3)
    assert built.notice == "" and not built.given and not on_meta.given
    for name, parameter in built.model.named_parameters():
        one, other = torch.empty(parameter.shape), torch.empty(parameter.shape)
        built.fill(name, one)
        on_meta.fill(name, other)
        assert torch.equal(one, other)
    reference = dict(GPT(SMALL).named_buffers())
    for blueprint in (built, on_meta):
        buffers = dict(blueprint.model.named_buffers())
        assert all(torch.equal(buffers[name], reference[name]) for name in reference)
    assert not any("rotary" in name for name in built.model.state_dict())


def test_rotary_positions_depend_on_distance_alone() -> None:
    rotary = small().blocks[0].attention.rotary
    q, k = torch.randn(16), torch.randn(16)
    turned_q, turned_k = rotary(q.expand(1, 1, 16, 16))[0, 0], rotary(k.expand(1, 1, 16, 16))[0, 0]
    scores = turned_q @ turned_k.t()
    assert torch.allclose(scores[5, 2], scores[13, 10], atol=1e-4)
    assert not torch.allclose(scores[5, 2], scores[5, 3], atol=1e-4)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(16), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_train(dtype: torch.dtype) -> None:
    model = small()
    tokens = torch.randint(50, (2, 16))
    exact = model(tokens)
    narrow = model.to(dtype)
    logits = narrow(tokens)
    assert logits.dtype == dtype
    assert (logits.float() - exact).abs().max() < 0.05
    total, count = next_token_loss(logits, {"targets": tokens})
    assert total.dtype == torch.float32
    (total / count).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_dropout_acts_in_training_alone() -> None:
    model = small(dropout=0.5)
    tokens = torch.randint(50, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("chunk", [1, 100, 1 << 21])
def test_loss_is_cross_entropy_over_counted_targets(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    logits = torch.randn(3, 7, 50, requires_grad=True)
    targets = torch.randint(50, (3, 7))
    targets[0, :5] = -100
    targets[2] = -100
    total, count = next_token_loss(logits, {"targets": targets})
    (0.3 * total).backward()
    mine, logits.grad = logits.grad, None
    expected = F.cross_entropy(logits.view(-1, 50), targets.view(-1), ignore_index=-100, reduction="sum")
    (0.3 * expected).backward()
    assert count.item() == 9
    assert torch.allclose(total, expected) and torch.allclose(mine, logits.grad, atol=1e-6)
    assert not mine[2].any()


def test_loss_of_no_counted_target_is_zero() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    total, count = next_token_loss(logits, {"targets": torch.full((2,), -100)})
    total.backward()
    assert total.item() == 0 and count.item() == 0 and not logits.grad.any()
    with torch.no_grad():
        assert next_token_loss(logits, {"targets": torch.tensor([1, 2])})[0] > 0


def test_generate_appends_count_tokens_and_repeats_with_the_seed() -> None:
    model = small().eval()
    prompt = torch.randint(50, (2, 4))

    def sample(seed: int, temperature: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, 30, sequence_length=16, temperature=temperature, generator=generator)

    first = sample(1)
    assert first.shape == (2, 34) and torch.equal(first[:, :4], prompt)
    assert torch.equal(first, sample(1)) and not torch.equal(first, sample(2))
    assert torch.equal(sample(1, temperature=0), sample(2, temperature=0))


def test_generate_shows_the_model_at_most_sequence_length_tokens() -> None:
    seen: list[int] = []

    def next_number(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tokens.size(1))
        return F.one_hot((tokens + 1) % 10, 10) * 100.0

    drawn = generate(next_number, torch.tensor([[3]]), 8, sequence_length=5)
    assert drawn.tolist() == [[3, 4, 5, 6, 7, 8, 9, 0, 1]]
    assert seen == [1, 2, 3, 4, 5, 5, 5, 5]


def test_it_learns() -> None:
    model = small(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = torch.arange(17).repeat(4, 1) * torch.tensor([[1], [2], [3], [5]]) % 50
    for _ in range(80):
        total, count = next_token_loss(model(sequence[:, :-1]), {"targets": sequence[:, 1:]})
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5


def test_a_width_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="width 30 is no multiple of 2"):
        GPTConfig(width=30, heads=4)

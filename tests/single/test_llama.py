"""The bundled Llama: beside Transformers' own, and in itself.

Close (1e-5 in fp32): Transformers' logits and gradients, which are the same sums in another order.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor, nn

from zero3d.initial import draw
from zero3d.models.gpt import GPT, GPTConfig, generate
from zero3d.models.llama import EPS, Llama, LlamaConfig
from zero3d.models.losses import next_token_loss

SMALL = LlamaConfig(vocabulary=50, sequence_length=16, width=32, layers=2, heads=4, kv_heads=2, mlp_width=48)
NAMES = [
    ("embedding", "model.embed_tokens"),
    ("attention_norm", "input_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("norm", "model.norm"),
    ("attention.q", "self_attn.q_proj"),
    ("attention.k", "self_attn.k_proj"),
    ("attention.v", "self_attn.v_proj"),
    ("attention.out", "self_attn.o_proj"),
    ("mlp.gate", "mlp.gate_proj"),
    ("mlp.up", "mlp.up_proj"),
    ("mlp.down", "mlp.down_proj"),
    ("head", "lm_head"),
]
"""What a module is called here and by Transformers."""


def small(**changes: object) -> Llama:
    torch.manual_seed(0)
    return Llama(replace(SMALL, **changes))  # type: ignore[arg-type]


def theirs(name: str) -> str:
    """A parameter's name in Transformers."""
    path = name.removesuffix(".weight")
    block = ""
    if path.startswith("blocks."):
        _, number, path = path.split(".", 2)
        block = f"model.layers.{number}."
    return f"{block}{dict(NAMES)[path]}.weight"


def twin_of(model: Llama) -> transformers.LlamaForCausalLM:
    """Transformers' model of the same sizes, with the weights of `model` copied in."""
    config = model.config
    twin = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.inner_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.sequence_length,
            rms_norm_eps=EPS,
            tie_word_embeddings=config.tied,
        )
    )
    state = {theirs(name): value for name, value in model.state_dict().items()}
    twin.load_state_dict(state)  # strict: not one tensor more or less
    return twin


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
def test_logits_and_gradients_are_those_of_transformers(kv_heads: int | None, tied: bool) -> None:
    model = small(kv_heads=kv_heads, tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at first: attention is far from flat, norms are not ones
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    twin = twin_of(model)
    tokens = torch.randint(50, (3, 16))
    mine, expected = model(tokens), twin(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    for logits in (mine, expected):
        total, count = next_token_loss(logits, {"targets": tokens.roll(-1, 1)})
        (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[theirs(name)], rtol=1e-4, atol=1e-5, msg=name)


def test_sizes_that_are_left_out() -> None:
    config = LlamaConfig(width=256, heads=8)
    assert config.num_kv_heads == 8 and config.inner_width == 704  # 8/3 * 256 = 682.7
    assert LlamaConfig(width=384, heads=8).inner_width == 1024  # a multiple of 64 as it is


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="width 30 is no multiple of 2"):
        LlamaConfig(width=30, heads=4)
    with pytest.raises(ValueError, match="heads 4 is no multiple of kv_heads 3"):
        LlamaConfig(width=32, heads=4, kv_heads=3)


def test_later_tokens_do_not_influence_earlier_logits() -> None:
    model = small()
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_no_parameter_is_a_bias_and_the_head_is_tied_on_request() -> None:
    assert all(name.endswith(".weight") for name, _ in small().named_parameters())
    sizes = [sum(parameter.numel() for parameter in small(tied=tied).parameters()) for tied in (False, True)]
    block = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32
    assert sizes == [2 * 50 * 32 + 2 * block + 32, 50 * 32 + 2 * block + 32]


def test_a_model_on_meta_starts_as_one_built_by_its_function() -> None:
    with torch.device("meta"):
        on_meta = draw(Llama(SMALL), seed=3)
    built = draw(lambda: Llama(SMALL), seed=3)
    assert built.notice == "" and not built.given and not on_meta.given
    for name, parameter in built.model.named_parameters():
        one, other = torch.empty(parameter.shape), torch.empty(parameter.shape)
        built.fill(name, one)
        on_meta.fill(name, other)
        assert torch.equal(one, other)
    reference = dict(Llama(SMALL).named_buffers())
    for blueprint in (built, on_meta):
        buffers = dict(blueprint.model.named_buffers())
        assert all(torch.equal(buffers[name], reference[name]) for name in reference)
    assert not any("rotary" in name for name in built.model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_train(dtype: torch.dtype) -> None:
    model = small()
    tokens = torch.randint(50, (2, 16))
    exact = model(tokens)
    narrow = model.to(dtype)
    logits = narrow(tokens)
    assert logits.dtype == dtype
    # Logits go to 3, where bf16 has steps of 1/64; about a dozen roundings add up.
    assert (logits.float() - exact).abs().max() < 0.1
    total, count = next_token_loss(logits, {"targets": tokens})
    (total / count).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_dropout_acts_in_training_alone() -> None:
    model = small(dropout=0.5)
    tokens = torch.randint(50, (1, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_it_generates() -> None:
    model = small().eval()
    prompt = torch.randint(50, (2, 4))
    drawn = generate(model, prompt, 30, sequence_length=16, temperature=0)
    assert drawn.shape == (2, 34) and torch.equal(drawn[:, :4], prompt)
    for place in (4, 20, 33):
        seen = drawn[:, max(0, place - 16) : place]
        assert torch.equal(drawn[:, place], model(seen)[:, -1].argmax(-1))


def test_it_learns() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sequence = torch.arange(17).repeat(4, 1) * torch.tensor([[1], [2], [3], [5]]) % 50
    for _ in range(80):
        total, count = next_token_loss(model(sequence[:, :-1]), {"targets": sequence[:, 1:]})
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert total / count < 0.5


class Some(nn.Module):
    """Some of a projection's output features: what a rank has that holds these rows of its matrix."""

    def __init__(self, whole: nn.Module, features: Tensor) -> None:
        super().__init__()
        self.whole, self.features = whole, features

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)[..., self.features]  # type: ignore[no-any-return]


class Joined(nn.Module):
    """Two samples' features put side by side along T before the projection, so that it sees another T than `x` has."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(torch.cat((x, x), dim=1))  # type: ignore[no-any-return]


def attention_of_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(sequence_length=16, width=32, heads=4, layers=1)).blocks[0].attention


def attention_of_llama() -> nn.Module:
    return small(layers=1).blocks[0].attention


BOTH = pytest.mark.parametrize("make", [attention_of_gpt, attention_of_llama])


def projections(attention: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, part) for name, part in attention.named_children() if name in ("q", "k", "v", "qkv"))


@BOTH
def test_attention_follows_the_heads_and_the_length_that_projections_return(make: Callable[[], nn.Module]) -> None:
    """Two halves of the heads add up to the whole; projections may return more tokens than the module was given."""
    x, whole = torch.randn(2, 8, 32), make()
    total = torch.zeros(())
    for half in (0, 1):
        attention = make()
        for name, part in list(projections(attention)):
            chosen = torch.arange(part.weight.size(0)).chunk(2)[half]
            setattr(attention, name, Some(part, chosen))
        columns = torch.zeros(32)
        columns[16 * half : 16 * half + 16] = 1
        weight = attention.out.weight[:, columns.bool()]
        attention.out = nn.Linear(16, 32, bias=False)
        attention.out.weight = nn.Parameter(weight.detach())
        total = total + attention(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-6)
    longer = make()
    for name, part in list(projections(longer)):
        setattr(longer, name, Joined(part))
    torch.testing.assert_close(longer(x), whole(torch.cat((x, x), dim=1)))


@BOTH
def test_attention_keeps_no_more_of_the_projections_than_it_needs(make: Callable[[], nn.Module]) -> None:
    """It kept q and k before their rotation as well: v was a view of the one projection of all three."""
    attention, x = make(), torch.randn(3, 16, 32)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        y = attention(x)
    own = [*attention.parameters(), *attention.buffers()]
    total = sum(kept.values()) - sum(kept.get(tensor.untyped_storage()._cdata, 0) for tensor in own)
    grouped = make is attention_of_llama
    features = 32 + 32 + (16 + 16 if grouped else 32 + 32)  # x, q, k and v
    features += 2 * 32 + 4  # what attention makes, head by head and token by token, and a number a head
    assert y.requires_grad and total <= 4 * 3 * 16 * features

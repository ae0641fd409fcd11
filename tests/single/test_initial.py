"""First weights: from (seed, name) alone, and meaning what the constructor means."""

import copy
import math
import os
import re
import sys

import pytest
import torch
from torch import Tensor, nn

from zero3d.errors import UsageError
from zero3d.initial import Blueprint, draw


def values(blueprint: Blueprint, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(blueprint.model.get_parameter(name).shape, math.nan, dtype=dtype)
    blueprint.fill(name, out)
    return out


def all_values(blueprint: Blueprint) -> dict[str, Tensor]:
    return {name: values(blueprint, name) for name, _ in blueprint.model.named_parameters()}


def eager(build):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(99)
        return build()


def assert_same_distribution(blueprint: Blueprint, build, *, min_numel: int = 400) -> None:
    """Mean and standard deviation of each large parameter are the eager build's; constants are equal."""
    reference = dict(eager(build).named_parameters())
    assert list(reference) == list(dict(blueprint.model.named_parameters()))
    for name, parameter in reference.items():
        mine = values(blueprint, name)
        theirs = parameter.detach().float()
        assert torch.isfinite(mine).all(), name
        assert blueprint.model.get_parameter(name).requires_grad == parameter.requires_grad
        if theirs.unique().numel() == 1:
            assert torch.equal(mine, theirs), name
        elif theirs.numel() >= min_numel:
            spread, error = theirs.std().item(), 6 * theirs.std().item() / math.sqrt(theirs.numel())
            assert abs(mine.mean().item() - theirs.mean().item()) < 1.5 * error, name
            assert abs(mine.std().item() - spread) < error, name
            assert not torch.equal(mine, theirs), name
            assert abs(mine.abs().max() - theirs.abs().max()) < 2 * spread, name


class TinyGPT(nn.Module):
    """Weights as in nanoGPT: `apply`, a loop over named parameters, tied output."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        block = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)


def test_nanogpt_style_initialisation_comes_out_right() -> None:
    blueprint = draw(TinyGPT, seed=0)
    assert blueprint.notice == "" and not blueprint.given
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    assert blueprint.model.embed.weight is blueprint.model.head.weight
    assert_same_distribution(blueprint, TinyGPT)
    assert abs(values(blueprint, "blocks.0.1.weight").std() - 0.5) < 0.05
    assert abs(values(blueprint, "embed.weight").std() - 0.02) < 0.002


def test_values_depend_on_seed_and_name_alone() -> None:
    first = all_values(draw(lambda: TinyGPT(layers=2), seed=5))
    torch.rand(7)
    other = draw(lambda: TinyGPT(layers=4), seed=5)
    for name in reversed(list(first)):
        assert torch.equal(first[name], values(other, name)), name
    assert not torch.equal(first["blocks.0.1.weight"], first["blocks.1.1.weight"])
    assert not torch.equal(first["blocks.0.1.weight"], values(draw(TinyGPT, seed=6), "blocks.0.1.weight"))


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    parts = TinyGPT, lambda: nn.LSTM(4, 4), lambda: Orthogonal(lambda w: w.norm().item())
    blueprint = draw(lambda: nn.Sequential(*(part() for part in parts)), seed=1)
    all_values(blueprint)
    all_values(draw(meta(lambda: nn.Linear(4, 4)), seed=1))
    assert torch.equal(before, torch.get_rng_state())


def test_fill_writes_any_dtype_and_refuses_what_does_not_fit() -> None:
    blueprint = draw(lambda: nn.Linear(8, 4), seed=0)
    exact = values(blueprint, "weight")
    assert torch.equal(values(blueprint, "weight", torch.bfloat16), exact.bfloat16())
    assert torch.equal(values(blueprint, "weight", torch.float64), exact.double())
    with pytest.raises(UsageError, match="no parameter 'wieght'"):
        blueprint.fill("wieght", exact)
    with pytest.raises(UsageError, match=r"\(4, 8\), not \(8, 4\)"):
        blueprint.fill("weight", exact.t())
    blueprint.fill("weight", torch.empty(4, 8, device="meta"))


LAYERS = {
    "linear": lambda: nn.Linear(32, 24),
    "conv": lambda: nn.Conv2d(8, 16, 3),
    "embedding": lambda: nn.Embedding(40, 16, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm(16),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "lstm": lambda: nn.LSTM(24, 24, num_layers=2),
    "bilinear": lambda: nn.Bilinear(8, 8, 8),
    "encoder layer": lambda: nn.TransformerEncoderLayer(32, 4, 64),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 3),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "lists": lambda: nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(2, 2))]),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_torch_layers_start_as_eager_ones_do(kind: str) -> None:
    blueprint = draw(LAYERS[kind], seed=3)
    assert blueprint.notice == "" and not blueprint.given
    assert_same_distribution(blueprint, LAYERS[kind])


def test_padding_row_stays_zero() -> None:
    weight = values(draw(LAYERS["embedding"], seed=0), "weight")
    assert not weight[3].any() and weight[2].any()


def test_copies_of_a_layer_are_equal_as_in_the_eager_build() -> None:
    """nn.TransformerEncoder deep-copies a prototype; its layers start equal."""
    drawn = all_values(draw(LAYERS["encoder"], seed=0))
    for leaf in ("self_attn.in_proj_weight", "linear1.weight", "linear1.bias"):
        assert torch.equal(drawn[f"layers.0.{leaf}"], drawn[f"layers.2.{leaf}"])
    assert not torch.equal(drawn["layers.0.linear1.bias"], drawn["layers.0.linear2.bias"])

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Linear(4, 4)
            nn.init.normal_(self.online.weight)
            self.target = copy.deepcopy(self.online)
            nn.init.normal_(self.online.bias)

    drawn = all_values(draw(Pair, seed=0))
    assert torch.equal(drawn["online.weight"], drawn["target.weight"])
    assert not torch.equal(drawn["online.bias"], drawn["target.bias"])


class Handmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.Parameter(torch.ones(3))
        self.full = nn.Parameter(torch.full((2, 2), 2.5), requires_grad=False)
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.scaled = nn.Parameter(torch.randn(40, 40) * 0.02)
        self.plain = nn.Parameter(torch.randn(40, 40))
        self.late = nn.Parameter(torch.empty(40, 40))
        self.late.data.uniform_(-1, 1)
        with torch.no_grad():
            self.late.mul_(3).add_(1)
            self.late[0] = 7
            self.late[:, 1:3].zero_()
            self.listed[1] = -1
        self.tensor = nn.Parameter(torch.empty(4))
        nn.init.constant_(self.tensor, 0.25)
        self.narrow = nn.Parameter(torch.empty(30, 30, dtype=torch.bfloat16))
        nn.init.trunc_normal_(self.narrow, std=0.1, a=-0.2, b=0.2)


def test_parameters_made_by_hand() -> None:
    blueprint = draw(Handmade, seed=0)
    assert blueprint.notice == ""
    assert blueprint.given == {"listed", "scaled"}
    assert_same_distribution(blueprint, Handmade)
    assert values(blueprint, "ones").tolist() == [1, 1, 1]
    assert values(blueprint, "listed").tolist() == [1, -1, 3]
    assert values(blueprint, "tensor").tolist() == [0.25] * 4
    late = values(blueprint, "late")
    assert late[0, 0] == 7 and late[0, 3] == 7 and not late[:, 1:3].any()
    rest = late[1:, 3:]
    assert abs(rest.mean() - 1) < 0.2 and rest.min() >= -2 and rest.max() <= 4 and rest.max() > 3.8
    half = values(blueprint, "narrow")
    assert half.abs().max() <= torch.tensor(0.2).bfloat16() and torch.equal(half, half.bfloat16().float())


def own_orthogonal_(weight: Tensor) -> None:
    """As torch up to 2.11 did it, with scratch tensors and a changed shape."""
    flat = weight.new_empty(weight.shape).normal_(0, 1)
    flat.t_()
    q, r = torch.linalg.qr(flat)
    q *= torch.diag(r, 0).sign()
    q.t_()
    with torch.no_grad():
        weight.view_as(q).copy_(q)
        weight.mul_(2)


def own_trunc_normal_(weight: Tensor) -> None:
    with torch.no_grad():
        weight.uniform_(-0.9, 0.9).erfinv_().mul_(0.1).add_(1).clamp_(min=0.9, max=1.1)


INITIALISERS = {
    "own orthogonal_": own_orthogonal_,
    "own trunc_normal_": own_trunc_normal_,
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03),
    "trunc_normal_ far": lambda w: nn.init.trunc_normal_(w, mean=0.0, std=1.0, a=-0.1, b=0.1),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.25),
    "eye_": nn.init.eye_,
    "copied": lambda w: w.data.copy_(torch.arange(w.numel(), dtype=torch.float32).view_as(w)),
    "reassigned": lambda w: setattr(w, "data", w.data * 0.1 + 2),
    "scratch": lambda w: w.data.copy_(torch.empty_like(w).normal_() * 0.3),
    "clamped": lambda w: w.data.normal_().clamp_(-1, 1),
}


class Initialised(nn.Module):
    def __init__(self, initialise) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 40))
        nn.init.uniform_(self.weight)
        initialise(self.weight)


@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers(name: str) -> None:
    """Some functions of nn.init do nothing to a meta tensor, silently; they must come out right."""

    def build() -> nn.Module:
        return Initialised(INITIALISERS[name])

    blueprint = draw(build, seed=1)
    assert blueprint.notice == ""
    reference, mine = eager(build).weight.detach(), values(blueprint, "weight")
    assert abs(mine.mean() - reference.mean()) < 0.3 * reference.std()
    assert abs(mine.std() - reference.std()) < 0.1 * reference.std()
    assert abs(mine.abs().max() - reference.abs().max()) < reference.std()
    assert (mine == 0).sum() == (reference == 0).sum()
    if "orthogonal_" in name:
        size = 2 if "own" in name else 1
        assert torch.allclose(mine @ mine.t(), size**2 * torch.eye(40), atol=1e-5)
    if name in ("eye_", "copied"):
        assert torch.equal(mine, reference)
    assert torch.equal(mine, values(blueprint, "weight"))


class Orthogonal(nn.Module):
    """Does something with its weight after `nn.init.normal_`."""

    def __init__(self, use) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        use(self.fc.weight)


def keep_as_attribute(weight: Tensor) -> None:
    return None


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = self.fc.weight.detach().norm()


class OldReference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.empty(6, 6))
        self.weight = weight
        nn.init.normal_(weight)


class Swallows(nn.Module):
    """Catches the error that tells it that it cannot have a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        try:
            self.fc.weight.data.div_(self.fc.weight.max().item())
        except Exception:
            nn.init.ones_(self.fc.weight)


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))
        if self.weight.device.type != "meta":
            nn.init.normal_(self.weight)


UNRECORDABLE = {
    "item": (lambda: Orthogonal(lambda w: w.div_(w.norm().item())), "_local_scalar_dense.*from a parameter"),
    "numpy": (lambda: Orthogonal(lambda w: w.detach().numpy()), "numpy"),
    "attribute": (Attribute, "norm is computed from a parameter"),
    "reference": (OldReference, "OldReference.weight was used by aten.normal_"),
    "swallowed": (Swallows, "_local_scalar_dense"),
    "uninitialised": (Uninitialised, "sets weight"),
}


@pytest.mark.parametrize("case", UNRECORDABLE)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_recorded_is_built_in_memory_and_told(case: str) -> None:
    build, told = UNRECORDABLE[case]
    if case == "item":
        with torch.no_grad():
            blueprint = draw(build, seed=2)
    else:
        blueprint = draw(build, seed=2)
    assert "built in memory on every rank" in blueprint.notice
    assert re.search(told, blueprint.notice), blueprint.notice
    named = dict(blueprint.model.named_parameters())
    assert blueprint.given == set(named)
    for name, parameter in named.items():
        assert not parameter.is_meta and torch.equal(values(blueprint, name), parameter)
    again = draw(build, seed=2) if case != "item" else blueprint
    assert all(torch.equal(a, b) for a, b in zip(all_values(blueprint).values(), all_values(again).values()))


@pytest.mark.filterwarnings("ignore")
def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    with pytest.raises(UsageError, match="weight has no shape yet"):
        draw(lambda: nn.LazyLinear(3), seed=0)


def test_errors_of_the_function_are_its_own() -> None:
    def build() -> nn.Module:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        draw(build, seed=0)
    with pytest.raises(UsageError, match=r"returned int, no nn.Module"):
        draw(lambda: 3, seed=0)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        angles = torch.outer(torch.arange(6.0), 1 / 10000 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())


def test_buffers_are_real_and_equal_to_the_eager_ones() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Rotary(), nn.BatchNorm1d(4))

    def build_on_meta() -> nn.Module:
        with torch.device("meta"):
            return build()

    reference = dict(eager(build).named_buffers())
    for function in (build, build_on_meta):
        blueprint = draw(function, seed=0)
        assert blueprint.notice == ""
        buffers = dict(blueprint.model.named_buffers())
        assert set(buffers) == set(reference)
        assert all(torch.equal(buffers[name], reference[name]) for name in reference)
        assert "0.cos" not in blueprint.model.state_dict()
        assert all_values(blueprint).keys() == {"0.fc.weight", "0.fc.bias", "1.weight", "1.bias"}


def test_one_parameter_object_in_two_modules_stays_one() -> None:
    def build() -> nn.Module:
        shared = nn.Parameter(torch.zeros(4, 4))
        pair = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        pair[0].weight = shared
        pair[1].weight = shared
        return pair

    model = draw(build, seed=0).model
    assert model[0].weight is model[1].weight


def test_a_whole_state_dict_loaded_while_building_is_given() -> None:
    source = eager(lambda: nn.Linear(4, 4))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].load_state_dict(source.state_dict())
        return model

    blueprint = draw(build, seed=0)
    assert blueprint.given == {"0.weight", "0.bias"}
    assert torch.equal(values(blueprint, "0.weight"), source.weight)


def test_eager_modules_keep_their_values() -> None:
    model = eager(TinyGPT)
    blueprint = draw(model, seed=0)
    assert blueprint.model is model and blueprint.given == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(values(blueprint, name), parameter)


def meta(build):
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "lists"])
def test_meta_modules_are_filled_by_reset_parameters(kind: str) -> None:
    blueprint = draw(meta(LAYERS[kind]), seed=3)
    assert blueprint.notice == "" and not blueprint.given
    assert_same_distribution(blueprint, LAYERS[kind])


def test_a_meta_module_starts_as_the_function_that_builds_it() -> None:
    on_meta, built = (all_values(draw(source, seed=4)) for source in (meta(Rows), Rows))
    assert all(torch.equal(on_meta[name], built[name]) for name in built)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.inner = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)


def test_a_module_half_on_meta_keeps_its_real_half() -> None:
    real = eager(lambda: nn.Linear(4, 4))
    model = nn.Sequential(real, meta(lambda: nn.Linear(4, 4)))
    blueprint = draw(model, seed=0)
    assert blueprint.given == {"0.weight", "0.bias"}
    assert torch.equal(values(blueprint, "0.weight"), real.weight)
    assert values(blueprint, "1.weight").abs().max() <= 0.5


def test_meta_buffers_are_made_by_reset_parameters_or_refused() -> None:
    model = draw(meta(lambda: nn.BatchNorm1d(4)), seed=0).model
    assert torch.equal(model.running_var, torch.ones(4)) and model.num_batches_tracked.item() == 0
    with pytest.raises(UsageError, match=r"cos is on meta and the model \(Rotary\) has no reset_p") as caught:
        draw(meta(Rotary), seed=0)
    assert "function that builds" in caught.value.hint


def test_meta_parameters_that_nothing_fills_are_refused() -> None:
    with pytest.raises(UsageError, match=r"scale is on meta and the model \(Orthogonal\) has no reset"):
        draw(meta(lambda: Orthogonal(keep_as_attribute)), seed=0)

    class Partial(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)
            with torch.no_grad():
                self.bias[0] = 1

    with pytest.raises(UsageError, match=r"bias is on meta .* does not fill it"):
        draw(meta(lambda: Partial(3, 3)), seed=0)


def resident_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_drawing_holds_about_one_parameter_in_memory() -> None:
    """A model of 200 MB, also where the parameters are created with values that are replaced later."""

    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4200, 2048))
            nn.init.trunc_normal_(self.weight, std=0.02)

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 4200) for _ in range(3)), *(Ones() for _ in range(3)))

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = resident_bytes("VmRSS")
            with open("/proc/self/clear_refs", "w") as reset:
                reset.write("5")
            blueprint = draw(build, seed=0)
            total = sum(p.numel() * 4 for p in blueprint.model.parameters())
            used = resident_bytes("VmHWM") - before
            os.write(write, f"{total} {used} {len(blueprint.given)}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    total, used, given = map(int, os.read(read, 100).split())
    os.close(read)
    assert total > 200e6 and given == 0
    assert used < 1.6 * 4200 * 2048 * 4

"""What tensor parallelism cuts of a model that says so itself, as zero3d's own and those of Transformers do.

Of Transformers' plans only the linear layers are taken as they stand. What they leave out is read from the model: the
embedding, attention that computes shapes from its input, KV heads fewer than ranks, where the sequence ends.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

GPT2 = {
    "wte": "vocab",
    "h.*.attn": "gather + divide(split_size, num_heads)",
    "h.*.attn.c_attn": "qkv({heads}, {heads})",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
    "ln_f": "sequence_end",
}
HEAD = "colwise_gather_output"


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Patterns of module paths and their styles (see tensor/plan.py); empty where the model brings no plan. A plan
    that a module inside the model brings counts too."""
    found: dict[str, str] = {}
    taken: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(one) for one in taken):
            continue
        plan = _transformers(module) if _is_transformers(module) else _own(module)
        if plan:
            prefix = f"{path}." if path else ""
            taken.append(prefix)
            found.update((prefix + pattern, style) for pattern, style in plan.items())
    return found


def _own(module: nn.Module) -> Mapping[str, str]:
    plan = getattr(module, "tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _is_transformers(module: nn.Module) -> bool:
    return hasattr(module, "base_model_prefix") and hasattr(getattr(module, "config", None), "model_type")


def _transformers(model: Any) -> dict[str, str]:
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    config = model.config
    if config.model_type == "gpt2":
        plan = {key: style.format(heads=config.num_attention_heads) for key, style in GPT2.items()}
    else:
        plan = dict(getattr(config, "base_model_tp_plan", None) or {})
        if plan:
            plan |= dict(_left_out(base, plan))
    if not plan:
        return {}
    found = {prefix + pattern: style for pattern, style in plan.items()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found.update((path, HEAD) for path, module in model.named_modules() if module is head and head is not None)
    return found


def _left_out(base: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Lines that a plan of Transformers does not have, by the paths in the base model."""
    embedding = base.get_input_embeddings()
    yield from ((path, "vocab") for path, module in base.named_modules() if module is embedding)
    for pattern, style in plan.items():
        parent, _, name = pattern.rpartition(".")
        if style == "colwise" and name in ("k_proj", "v_proj"):
            yield pattern, "kv"
        if style == "moe_tp_experts":
            yield parent, "whole"
    for path, module in base.named_modules():
        if hasattr(module, "head_dim") and hasattr(module, "o_proj"):
            grouped = hasattr(module, "num_key_value_groups")
            yield path, "gather + regroup(num_key_value_groups)" if grouped else "gather"
    last = list(getattr(base.config, "base_model_pp_plan", None) or {})[-1:]
    yield from ((name, "sequence_end") for name in last if hasattr(base, name))

"""Which rule updates which parameter, and which parameters are updated whole. The same on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero3d import config
from zero3d.contracts import OptimizerChoice, OptimizerFactory
from zero3d.errors import ConfigError, UsageError
from zero3d.optim.probe import is_elementwise, keeps_apart, learning_rate, refusal_of, state_keys
from zero3d.optim.rule import Rule, matches, rule_for
from zero3d.params import ParamInfo

AUTO = "auto"
TWO_RULES = '{"blocks.*.weight": muon, "*": "adamw"}'


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """rule_of: trained parameter -> its rule; whole: those updated whole -> their shapes; learning_rate: the peak, of
    the first parameter's rule."""

    rule_of: Mapping[str, Rule]
    whole: Mapping[str, tuple[int, ...]]
    learning_rate: float

    def keys_of_state(self) -> dict[str, frozenset[str]]:
        """What the state of each parameter is called. Of those updated whole it hangs on the shape, and is not told."""
        names = [name for name in self.rule_of if name not in self.whole]
        keys = {rule: state_keys(rule.build) for rule in {self.rule_of[name]: None for name in names}}
        return {name: keys[self.rule_of[name]] for name in names}


def assign(
    choice: OptimizerChoice, options: config.Optimizer, whole: Sequence[str], infos: Sequence[ParamInfo]
) -> Assignment:
    """Reads `choice` (one optimizer, or pattern -> optimizer, of which the first match wins) and the patterns of
    parameters to be kept `whole` ("auto": those whose optimizer is not elementwise).

    Raises `ConfigError` for an unknown name and a pattern that matches nothing, `UsageError` for a parameter that
    nothing matches and for an optimizer that would compute something else than on the whole model at once.
    """
    named = choice if isinstance(choice, Mapping) else {"*": choice}
    rules = _rules(named, options, infos)
    for pattern in (*(named if isinstance(choice, Mapping) else ()), *(one for one in whole if one != AUTO)):
        if not any(matches(info, pattern) for info in infos):
            raise ConfigError(
                f'no parameter is called like "{pattern}"', hint="Names are those of model.named_parameters()."
            )
    trained = [info for info in infos if info.trainable and info.numel]
    rule_of = {info.name: _first(rules, info) for info in trained}
    looks_at_all = [rule for rule in dict.fromkeys(rules.values()) if not is_elementwise(rule.name, rule.build)]
    for rule in looks_at_all:
        _refuse_coupled(rule)
    kept: dict[str, tuple[int, ...]] = {}
    tried: set[tuple[Rule, tuple[int, ...]]] = set()
    for info in trained:
        rule = rule_of[info.name]
        asked = any(matches(info, pattern) for pattern in whole if pattern != AUTO)
        if not asked and rule not in looks_at_all:
            continue
        if not asked and AUTO not in whole:
            raise UsageError(
                f"optimizer {rule.name} does not treat each element by itself: on shards it would compute something "
                f"else, for {info.name} among others",
                hint='Set zero.whole_parameters = ["auto"], with offload.optimizer = "device": the state of such a '
                "parameter is then whole on one rank.",
            )
        kind = (rule, tuple(min(extent, 8) for extent in info.shape))
        if kind not in tried:
            _refuse_unless_taken(rule, info)
            tried.add(kind)
        kept[info.name] = info.shape
    first = next(iter(rule_of.values()), None)
    return Assignment(rule_of=rule_of, whole=kept, learning_rate=learning_rate(first.build) if first else 0.0)


def _rules(
    named: Mapping[str, str | OptimizerFactory], options: config.Optimizer, infos: Sequence[ParamInfo]
) -> dict[str, Rule]:
    """One rule for each optimizer, however many patterns name it."""
    made = {id(optimizer): rule_for(optimizer, options, infos) for optimizer in named.values()}
    return {pattern: made[id(optimizer)] for pattern, optimizer in named.items()}


def _first(rules: Mapping[str, Rule], info: ParamInfo) -> Rule:
    for pattern, rule in rules.items():
        if matches(info, pattern):
            return rule
    raise UsageError(
        f"no optimizer is given for parameter {info.name}",
        hint=f'The patterns are {", ".join(rules) or "none"}; "*" as the last one takes the rest.',
    )


def _refuse_coupled(rule: Rule) -> None:
    if not keeps_apart(rule.name, rule.build):
        raise UsageError(
            f"optimizer {rule.name} does not treat each element by itself, nor each parameter: a parameter's update "
            "depends on the others (a norm over all of them?), and no rank has all of them",
            hint="Leave clipping to optimizer.clip_norm, which is over all ranks; "
            "what remains must look at one parameter at a time.",
        )


def _refuse_unless_taken(rule: Rule, info: ParamInfo) -> None:
    problem = refusal_of(rule.build, info.shape)
    if problem:
        raise UsageError(
            f"optimizer {rule.name} does not take parameter {info.name} of shape {list(info.shape)}: {problem}",
            hint=f"Give matrices and the rest optimizers of their own: Engine(..., optimizer={TWO_RULES}).",
        )

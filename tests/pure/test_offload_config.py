"""What `[offload]` accepts, refuses and resolves to."""

import tomllib

import pytest

from zero3d.config import Config
from zero3d.errors import ConfigError

HOST = {"offload": {"optimizer": "host"}}
DISK = {"offload": {"optimizer": "disk", "folder": "states"}}


def refused(tree: dict[str, dict[str, object]], *settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config.load(tree, settings)
    return caught.value


def test_nothing_is_offloaded_unless_asked_for() -> None:
    offload = Config.load({}).offload
    assert (offload.optimizer, offload.parameters, offload.folder) == ("device", "device", None)
    assert (offload.delayed_update, offload.fraction, offload.device_mb) == (0, 1.0, None)
    assert offload.threads == "auto"


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("offload.optimizer=cpu", '"device", "host" or "disk", not "cpu"', ""),
        ("offload.parameters=disk", '"device" or "host", not "disk"', ""),
        ("offload.delayed_update=-1", "a whole number at least 0, not -1", ""),
        ("offload.fraction=0", 'a number above 0 and at most 1 or "auto", not 0', ""),
        ("offload.fraction=1.5", 'a number above 0 and at most 1 or "auto", not 1.5', ""),
        ("offload.device_mb=0", "a number above 0, not 0", ""),
        ("offload.threads=0", 'a whole number at least 1 or "auto", not 0', ""),
        ("zero.cpu_offload=true", "no key zero.cpu_offload", "offload.optimizer"),
        ("zero.offload_param=host", "no key zero.offload_param", "offload.parameters"),
        ("offload.nvme_path=states", "no key offload.nvme_path", "offload.folder"),
        ("offload.fracton=0.5", "no key offload.fracton", "offload.fraction"),
    ],
)
def test_values_and_names(setting: str, message: str, hint: str) -> None:
    error = refused(HOST, setting)
    assert message in error.message and hint in error.hint and error.where == f"--set {setting}"


@pytest.mark.parametrize(
    "setting",
    [
        "offload.parameters=host",
        "offload.folder=states",
        "offload.delayed_update=4",
        "offload.fraction=0.5",
        "offload.fraction=auto",
        "offload.device_mb=100",
        "offload.threads=2",
    ],
)
def test_what_means_nothing_without_offload_is_refused(setting: str) -> None:
    """No silent option."""
    error = refused({"zero": {"level": 3}}, setting)
    assert 'at offload.optimizer = "device", where nothing is offloaded' in error.message
    assert setting.partition("=")[0] in error.message and "disk" in error.hint
    assert error.where == f"--set {setting}"


@pytest.mark.parametrize(
    ("tree", "setting", "message", "hint"),
    [
        (HOST, "offload.parameters=host", '"host" at zero.level = 2, where the device needs all', "zero.level = 3"),
        (HOST, "offload.folder=states", 'folder = "states" at offload.optimizer = "host"', '"disk"'),
        (HOST, "offload.fraction=auto", "does not know what the device has room for", "offload.device_mb"),
        (HOST, "offload.device_mb=50", "device_mb = 50 and offload.fraction = 1 both say", 'fraction = "auto"'),
        (HOST, 'zero.whole_parameters=["*.up"]', 'zero.whole_parameters = ["*.up"] with', 'optimizer = "device"'),
        ({}, "offload.optimizer=disk", "has no folder for its files", "offload.folder"),
    ],
)
def test_keys_that_clash(tree: dict[str, dict[str, object]], setting: str, message: str, hint: str) -> None:
    error = refused(tree, setting)
    assert message in error.message and hint in error.hint


def test_level_0_offloads_on_one_rank_alone() -> None:
    """At once where dp is set, else as soon as the number of ranks is known."""
    error = refused(HOST, "zero.level=0", "parallel.dp=4")
    assert '"host" at zero.level = 0 on dp = 4 ranks' in error.message and "1/4" in error.hint
    config = Config.load(HOST, ["zero.level=0"])
    with pytest.raises(ConfigError, match="on dp = 2 ranks"):
        config.resolved(2, native_bf16=False)
    assert config.resolved(1, native_bf16=False).zero.reduce == "micro-batch"
    cut = Config.load(HOST, ["zero.level=0", "parallel.tp=2", "parallel.pp=2"])
    assert cut.resolved(4, native_bf16=False).parallel.dp == 1, "other axes may cut the model"


@pytest.mark.parametrize("tree", [HOST, DISK])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_is_accepted(tree: dict[str, dict[str, object]], level: int) -> None:
    for settings in (
        ["offload.delayed_update=4", "offload.threads=2"],
        ["offload.fraction=0.25"],
        ["offload.fraction=auto", "offload.device_mb=0.5"],
        ["zero.replicas=2"],
        ["zero.reduce=step"],
        ["offload.parameters=host"] if level == 3 else [],
    ):
        config = Config.load(tree, [f"zero.level={level}", *settings]).resolved(4, native_bf16=False)
        assert config.resolved(4, native_bf16=False) == config, "what is resolved stays so"
        assert Config.load(tomllib.loads(config.to_toml(notes=True))) == config


@pytest.mark.parametrize(
    ("level", "settings", "when", "travel"),
    [
        (0, ["offload.optimizer=device"], "step", "fp32"),
        (0, [], "micro-batch", "bf16"),
        (1, [], "micro-batch", "bf16"),
        (2, [], "micro-batch", "bf16"),
        (3, [], "micro-batch", "bf16"),
        (1, ["zero.reduce=step"], "step", "fp32"),
        (1, ["parallel.pp=2", "parallel.micro_batch=4"], "step", "fp32"),
        (2, ["parallel.pp=2", "parallel.micro_batch=4"], "step", "fp32"),
    ],
)
def test_gradients_leave_once_a_micro_batch(level: int, settings: list[str], when: str, travel: str) -> None:
    """So the device never holds their sums, at any level; in a pipeline they are reduced once a step, as without."""
    asked = Config.load(HOST, [f"zero.level={level}", "precision.compute=bf16", *settings])
    config = asked.resolved(asked.parallel.pp, native_bf16=False)
    assert (config.zero.reduce, config.precision.reduce) == (when, travel)


def test_rounded_sums_are_refused_with_offload_too() -> None:
    settings = ["precision.compute=bf16", "precision.gradients=compute", "parallel.micro_batch=2"]
    with pytest.raises(ConfigError, match="would round the sum of 8 micro-batches"):
        Config.load(HOST, settings).resolved(2, native_bf16=True)


def test_what_each_rank_and_machine_answers_for_itself_stays_auto() -> None:
    """Without offload nothing is left "auto" (C75); with it two keys have no one answer for all ranks."""
    plain = Config.load({}).resolved(2, native_bf16=False)
    assert "auto" not in plain.to_toml() and plain.offload.threads is None
    settings = ["offload.fraction=auto", "offload.device_mb=10"]
    config = Config.load(HOST, settings).resolved(2, native_bf16=False)
    assert config.offload.fraction == config.offload.threads == "auto"
    assert config.to_toml().count('"auto"') == 2
    again = Config.load(plain, ["offload.optimizer=host"]).resolved(2, native_bf16=False)
    assert again.offload.threads == "auto", "a resolved configuration may be changed and resolved again"

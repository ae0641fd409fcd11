"""What a configuration accepts, refuses and resolves to."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3d.config import Config
from zero3d.errors import ConfigError

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


def refused(source: object, *settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config.load(source, settings)  # type: ignore[arg-type]
    return caught.value


def test_defaults_and_demo_load() -> None:
    assert Config.load({}).zero.level == 2
    assert Config.load(DEMO).run.name == "demo"
    assert Config.load(Config.load(DEMO)) == Config.load(str(DEMO))


def test_loading_and_refusing_need_no_torch() -> None:
    """A refused configuration costs no seconds."""
    code = (
        "import sys; from zero3d.config import Config; from zero3d.errors import ConfigError\n"
        f"Config.load({str(DEMO)!r}).resolved(2, False)\n"
        "try: Config.load({'zero': {'level': 9}})\n"
        "except ConfigError: pass\n"
        "import zero3d.cli.main, zero3d.planner.memory\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("zero.levl=3", "no key zero.levl", "zero.level"),
        ("zero.micro_batch=2", "no key zero.micro_batch", "parallel.micro_batch"),
        ("optimizer.learning_rate=1", "no key optimizer.learning_rate", "optimizer.lr"),
        ("zer.level=1", "no section or key zer", "zero"),
        ("zero.level=7", "zero.level = 7 is outside 0 to 3", "3 also parameters"),
        ('zero.level="3"', 'zero.level takes a whole number, not "3"', ""),
        ("zero.level=true", "zero.level takes a whole number, not true", ""),
        ("zero.overlap=1", "zero.overlap takes true or false, not 1", ""),
        ("run.steps=1e3", "run.steps takes a whole number at least 1, not 1000.0", ""),
        ("optimizer.lr=nan", "optimizer.lr takes a number at least 0", ""),
        ("optimizer.lr=fast", 'optimizer.lr takes a number at least 0, not "fast"', ""),
        ("optimizer.betas=[0.9]", "optimizer.betas takes a list of 2", ""),
        ("optimizer.schedule=cos", '"constant", "linear" or "cosine", not "cos"', ""),
        ("parallel.dp=many", 'a whole number at least 1 or "auto", not "many"', ""),
        ("parallel.sequence_parallel=true", "true at parallel.tp = 1", "parallel.tp to 2"),
        ("parallel.plan=3", "parallel.plan takes a table, each value text", ""),
        ("optimizer.warmup=101", "more than run.steps = 100", "5"),
        ("run.stop_after=101", "more than run.steps = 100", "Leave"),
        ("model.heads=5", "does not divide into model.heads = 5", "4 or 8"),
        ("model.preset=bert", "no preset 'bert'", "gpt"),
        ("model.path=module", "does not name a function", "package.module:function"),
    ],
)
def test_a_refusal_says_what_where_and_what_to_do(setting: str, message: str, hint: str) -> None:
    error = refused({}, setting)
    assert message in error.message
    assert hint in error.hint
    assert error.where == f"--set {setting}"
    assert "pydantic" not in str(error)


@pytest.mark.parametrize("setting", ["zero.level", "level=3", "=3", "zero.=3", ".level=3", "zero=3"])
def test_a_malformed_setting_is_refused(setting: str) -> None:
    assert "section.key=value" in refused({}, setting).message


def test_several_mistakes_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[zero]\nlevle = 3\nbucket_mb = "big"\n\n[optimizer]\nlr = -1\n')
    text = str(refused(path))
    for part in (
        "3 keys",
        "zero.levle",
        "line 2",
        "zero.level",
        "zero.bucket_mb",
        "line 3",
        "optimizer.lr",
        "line 6",
    ):
        assert part in text


def test_a_file_that_is_missing_or_not_toml(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("")
    assert "demo.toml" in refused(tmp_path / "dmo.toml").hint
    assert "no folder" in refused(tmp_path / "none" / "demo.toml").hint
    assert "is a folder" in refused(tmp_path).message
    broken = tmp_path / "broken.toml"
    broken.write_text("[run]\nname = demo\n")
    error = refused(broken)
    assert "not TOML" in error.message and error.where == "line 2"
    broken.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(broken).message
    broken.write_text("[run")
    assert "not TOML" in refused(broken).message


def test_settings_are_toml_and_bare_words_are_text() -> None:
    config = Config.load(
        {"run": {"seed": 1}},
        [
            "run.seed=2",
            "run.name=3",
            "run.out=runs/a b",
            'data.source="x"',
            "optimizer.betas=[0.5, 0]",
            "zero.overlap=false",
        ],
    )
    assert config.run.seed == 2 and config.run.name == "3" and config.run.out == "runs/a b"
    assert config.data.source == "x" and config.optimizer.betas == (0.5, 0.0) and not config.zero.overlap


def test_settings_do_not_touch_the_dict_they_are_laid_over() -> None:
    given = {"zero": {"level": 1}}
    assert Config.load(given, ["zero.level=3"]).zero.level == 3
    assert given == {"zero": {"level": 1}}


def test_resolved_leaves_no_auto() -> None:
    """C75: nothing is left to be decided, and what is saved is what runs."""
    config = Config.load({"precision": {"compute": "auto"}}).resolved(world=4, native_bf16=True)
    assert '"auto"' not in config.to_toml()
    assert config.parallel.dp == 4 and config.parallel.micro_batch == 8 and config.micro_batches == 1
    assert config.precision.compute == "bf16" and config.precision.reduce == "bf16"
    assert config.resolved(4, native_bf16=False) == config


@pytest.mark.parametrize(
    ("level", "gradients", "compute", "when", "travel"),
    [
        (0, "fp32", "bf16", "step", "fp32"),
        (1, "fp32", "bf16", "step", "fp32"),
        (1, "compute", "bf16", "step", "bf16"),
        (2, "fp32", "bf16", "micro-batch", "bf16"),
        (3, "fp32", "fp16", "micro-batch", "fp16"),
        (3, "fp32", "fp32", "micro-batch", "fp32"),
        (2, "fp32", "model", "micro-batch", "own"),
        (0, "fp32", "model", "step", "fp32"),
        (0, "compute", "model", "step", "own"),
    ],
)
def test_gradients_travel_in_the_dtype_that_loses_nothing(
    level: int, gradients: str, compute: str, when: str, travel: str
) -> None:
    """Once a step sums travel, as they are held; once a micro-batch gradients do, as they were computed."""
    tree = {"zero": {"level": level}, "precision": {"gradients": gradients, "compute": compute}}
    config = Config.load(tree).resolved(2, native_bf16=False)
    assert (config.zero.reduce, config.precision.reduce) == (when, travel)


def test_auto_compute_is_fp32_where_bf16_is_slow() -> None:
    assert Config.load({}, ["precision.compute=auto"]).resolved(2, native_bf16=False).precision.compute == "fp32"


def test_a_batch_that_does_not_divide_shows_the_sum_and_two_ways_out() -> None:
    """C75: a conflict of batch and ranks ends in the sum and two fixes."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"data": {"global_batch": 10}}).resolved(4, native_bf16=False)
    assert "10 = 4 x 2 + 2" in caught.value.message
    assert "8 or 12" in caught.value.hint and "2 ranks" in caught.value.hint


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(ConfigError, match="fewer samples than ranks"):
        Config.load({"data": {"global_batch": 3}}).resolved(4, native_bf16=False)


def test_ranks_that_are_not_the_layouts() -> None:
    with pytest.raises(ConfigError, match="needs 2 ranks, and 3 are started"):
        Config.load({"parallel": {"dp": 2}}).resolved(3, native_bf16=False)


@pytest.mark.parametrize(
    ("dp", "replicas", "message", "hint"),
    [
        (4, 3, "zero.replicas = 3 does not cut dp = 4 ranks into equal groups", "1 or 2, or parallel.dp to a multiple"),
        (6, 4, "zero.replicas = 4 does not cut dp = 6 ranks", "1 or 2 or 3"),
        (1, 2, "zero.replicas = 2 does not cut dp = 1 rank into", "zero.replicas to 1,"),
        (4, 4, "makes groups of one rank, in which nothing is sharded", "1 or 2; to shard nothing, zero.level = 0"),
    ],
)
def test_groups_that_ranks_cannot_form(dp: int, replicas: int, message: str, hint: str) -> None:
    """At once where dp is set, else as soon as the number of ranks is known."""
    setting = f"zero.replicas={replicas}"
    error = refused({"parallel": {"dp": dp}}, setting)
    assert message in error.message and hint in error.hint
    with pytest.raises(ConfigError) as caught:
        Config.load({}, [setting]).resolved(dp, native_bf16=False, own_batches=True)
    assert message in caught.value.message and hint in caught.value.hint


def test_groups_that_shard_nothing_or_fit() -> None:
    assert "at zero.level = 0, where nothing is sharded" in refused({"zero": {"level": 0, "replicas": 2}}).message
    for dp, replicas in [(1, 1), (4, 2), (6, 2), (6, 3), (8, 4)]:
        config = Config.load({"zero": {"replicas": replicas}}).resolved(dp, native_bf16=False, own_batches=True)
        assert config.zero.replicas == replicas


def test_micro_batches_may_be_uneven_but_not_larger_than_the_part() -> None:
    config = Config.load({"parallel": {"micro_batch": 3}}).resolved(4, native_bf16=False)
    assert config.micro_batches == 3  # 8 = 3 + 3 + 2
    with pytest.raises(ConfigError, match="32 samples / 4 ranks = 8"):
        Config.load({"parallel": {"micro_batch": 9}}).resolved(4, native_bf16=False)


@pytest.mark.parametrize("compute", ["model", "bf16", "fp16"])
def test_rounded_sums_are_refused_unless_asked_for_by_name(compute: str) -> None:
    tree = {"parallel": {"micro_batch": 2}, "precision": {"compute": compute, "gradients": "compute"}}
    with pytest.raises(ConfigError, match="would round the sum of 8 micro-batches"):
        Config.load(tree).resolved(2, native_bf16=True)
    Config.load(tree, ["precision.gradients=compute-lossy"]).resolved(2, native_bf16=True)
    Config.load(tree, ["parallel.micro_batch=16"]).resolved(2, native_bf16=True)
    Config.load(tree, ["precision.compute=fp32"]).resolved(2, native_bf16=True)


def test_batches_of_the_callers_own_are_not_measured_against_the_default() -> None:
    config = Config.load({"parallel": {"dp": 3}}).resolved(3, native_bf16=False, own_batches=True)
    assert config.parallel.micro_batch is None
    assert config.resolved(3, native_bf16=False, own_batches=True) == config


def test_a_model_of_the_users_own_takes_the_presets_place() -> None:
    config = Config.load({"model": {"path": "mine:build"}})
    assert config.model.preset is None
    assert "both set" in refused({"model": {"path": "mine:build", "preset": "gpt"}}).message


@given(
    name=st.text(),
    steps=st.integers(1, 10**9),
    lr=st.floats(0, 1e6),
    patterns=st.lists(st.text(), max_size=3),
    stop=st.none() | st.just(1),
)
def test_toml_reads_back_to_an_equal_configuration(
    name: str, steps: int, lr: float, patterns: list[str], stop: int | None
) -> None:
    import tomllib

    tree = {
        "run": {"name": name, "steps": steps, "stop_after": stop},
        "optimizer": {"lr": lr, "no_decay": patterns},
    }
    config = Config.load(tree)
    for notes in (False, True):
        assert Config.load(tomllib.loads(config.to_toml(notes=notes))) == config


def test_every_option_says_what_it_means() -> None:
    undocumented = [
        f"{section}.{key}"
        for section, keys in Config.key_schemas().items()
        for key, schema in keys.items()
        if not schema.get("description")
    ]
    assert not undocumented


def test_every_default_passes_its_own_checks() -> None:
    Config.load(Config.load({}).model_dump())

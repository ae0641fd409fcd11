"""`zero3d memory`: the table of ZeRO as programs and people read it, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from zero3d.cli.main import app
from zero3d.cli.memory import number_of, ranks_of
from zero3d.errors import UsageError


def memory(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["memory", *words])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


def test_the_papers_example_for_programs() -> None:
    """7.5 billion parameters on 64 ranks: to the byte, levels first, rows with offload marked and last."""
    event = json.loads(memory("--params", "7.5e9", "--dp", "64", "--json"))
    assert (event["params"], event["dp"]) == (7_500_000_000, 64)
    plain, marked = event["levels"][:4], event["levels"][4:]
    assert [one["level"] for one in plain] == [0, 1, 2, 3] and not any("offload" in one for one in plain)
    assert [one["device_bytes"] for one in plain] == [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]
    assert [one["host_bytes"] for one in plain] == [0] * 4
    told = [(one["offload"], one["level"], one["device_bytes"], one["host_bytes"]) for one in marked]
    assert told == [
        ("optimizer", 1, 15_000_000_000, 1_640_625_000),
        ("optimizer", 2, 15_000_000_000, 1_640_625_000),
        ("optimizer", 3, 234_375_000, 1_640_625_000),
        ("parameters", 3, 0, 1_875_000_000),
    ]
    for one in event["levels"]:
        assert sum(one["device_by_kind"].values()) == one["device_bytes"]


@pytest.mark.parametrize("name", ["--devices", "--world"])
def test_other_verbs_names_of_dp(name: str) -> None:
    words = ("--params", "7.5B", "--json")
    assert memory(*words, name, "64") == memory(*words, "--dp", "64")


@pytest.mark.parametrize("name", ["--weights", "--gradients", "--k"])
def test_bytes_that_no_parameter_takes(name: str) -> None:
    assert name in memory("--params", "1B", name, "1000000000000", code=2)


def test_several_sizes_of_dp_are_a_line_each() -> None:
    lines = memory("--params", "1B", "--dp", "1,4,16", "--offload", "none", "--json").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["dp"] for event in events] == [1, 4, 16]
    assert [event["levels"][3]["device_bytes"] for event in events] == [16e9, 4e9, 1e9]
    assert [len(event["levels"]) for event in events] == [4, 4, 4]


def test_what_is_asked_for_alone() -> None:
    event = json.loads(memory("--params", "1e9", "--dp", "4", "--level", "2", "--offload", "optimizer", "--json"))
    assert [(one["level"], one.get("offload")) for one in event["levels"]] == [(2, None), (2, "optimizer")]


def test_other_widths() -> None:
    """fp32 with Adam: weights that are their own master; on the host the master is a copy, 4 bytes more."""
    words = (
        "--params",
        "1000",
        "--dp",
        "1",
        "--weights",
        "4",
        "--gradients",
        "4",
        "--k",
        "8",
        "--level",
        "1",
        "--json",
    )
    plain, offloaded = json.loads(memory(*words, "--offload", "optimizer"))["levels"]
    assert plain["device_bytes"] == 16 * 1000
    assert (offloaded["device_bytes"], offloaded["host_bytes"]) == (4 * 1000, 16 * 1000)


@pytest.mark.parametrize("k", [0, 2, 4, 6, 8, 12, 16])
def test_any_k_leaves_the_device_and_arrives_on_the_host(k: int) -> None:
    words = ("--params", "8000", "--dp", "4", "--k", str(k), "--level", "2", "--offload", "optimizer", "--json")
    plain, offloaded = json.loads(memory(*words))["levels"]
    assert plain["device_bytes"] == 2 * 8000 + (2 + k) * 2000
    assert (offloaded["device_bytes"], offloaded["host_bytes"]) == (2 * 8000, (2 + k) * 2000)


def test_the_tables_for_people() -> None:
    one = memory("--params", "7.5B", "--dp", "64")
    for shown in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB", "--gradients 4", "activations and"):
        assert shown in one
    assert "--gradients 4" not in memory("--params", "7.5B", "--dp", "64", "--gradients", "4")
    table_1 = memory("--params", "7.5B", "--offload", "none")
    rows = [line.split() for line in table_1.splitlines()]
    for dp, shown in {
        "1": "120 GB 120 GB 120 GB 120 GB",
        "4": "120 GB 52.5 GB 41.3 GB 30.0 GB",
        "16": "120 GB 35.6 GB 21.6 GB 7.50 GB",
        "256": "120 GB 30.4 GB 15.4 GB 469 MB",
        "1,024": "120 GB 30.1 GB 15.1 GB 117 MB",
    }.items():
        assert [dp, *shown.split()] in rows


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7.5e9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        ("7.5 b", 7_500_000_000),
        ("350M", 350_000_000),
        ("1.3T", 1_300_000_000_000),
        ("124439808", 124_439_808),
        ("124,439,808", 124_439_808),
        ("0.067B", 67_000_000),
    ],
)
def test_numbers_of_parameters(text: str, number: int) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "7.5BB",
        "-1e9",
        "0",
        "0.5",
        "1e400",
        "nan",
        "inf",
        "1.2.3",
        "7.5e",
        "1e19",
        "1.5",
        "1e999999999999999999999",
    ],
)
def test_what_is_no_number_of_parameters(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        number_of(text)
    assert "7.5B" in caught.value.hint


@pytest.mark.parametrize("text", ["", "0", "-4", "4,", "1,x", "2.5", "1e3", "99999999"])
def test_what_is_no_size_of_dp(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        ranks_of(text)
    assert "64" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["--params", "lots"], "7.5e9"),
        (["--params", "1B", "--dp", "none"], "1,4,16,64"),
        (["--params", "1.5"], "7.5B"),
        (["--params", "1B", "--offload", "weights"], "optimizer, parameters, none"),
        (["--params", "1B", "--offload", "parameters", "--level", "2"], "--level 3"),
        (["--params", "1B", "--offload", "optimizer", "--level", "0"], "--level 1"),
    ],
)
def test_bad_input_leaves_with_2_and_the_way_out(words: list[str], way_out: str) -> None:
    assert way_out in memory(*words, code=2)
    (line,) = [line for line in memory(*words, "--json", code=2).splitlines() if line.startswith("{")]
    event = json.loads(line)
    assert (event["event"], event["code"]) == ("error", 2) and way_out in event["hint"]

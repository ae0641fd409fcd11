"""What is offloaded, what that takes on the host, and what a machine has: on made-up machines."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero3d.errors import ConfigError
from zero3d.offload.budget import HostNeed, HostWidths, check, choose, need, report
from zero3d.offload.machine import Limit, free_memory, of_machine, of_process

BF16 = HostWidths(weight=2, gradient=4, down=2, moments=2)
FP32 = HostWidths(weight=4, gradient=4, down=4, moments=2, apart=False)
SHARDS = [(1000, BF16), (4000, BF16), (2000, BF16)]
GB = 10**9


def test_host_memory_of_adam_is_the_papers_12_bytes_and_the_gradient() -> None:
    one = need(SHARDS)
    assert one.master + one.moments == 12 * 7000 and one.gradients == 4 * 7000 and one.weights == 0
    assert one.staging == 2 * 4000 * (2 + 2), "two buffers a direction, of the largest shard"
    assert one.total == 16 * 7000 + one.staging and one.pinned == one.disk == 0


def test_staging_alone_is_pinned_however_many_shards_there_are() -> None:
    assert need(SHARDS, pins=True).pinned == need(SHARDS * 50, pins=True).pinned == 4 * 8192 > 2 * 4000 * (2 + 2)


def test_a_delayed_update_reads_one_set_of_gradients_while_another_arrives() -> None:
    plain, delayed = need(SHARDS), need(SHARDS, delayed=True)
    assert delayed.gradients == 2 * plain.gradients and delayed.total - plain.total == plain.gradients


def test_on_disk_two_shards_are_in_memory_and_the_gradients() -> None:
    one = need(SHARDS, home="disk")
    assert one.disk == 12 * 7000
    assert one.master == 4 * 6000 and one.moments == 8 * 6000 and one.gradients == 4 * 7000
    single = need(SHARDS[:1], home="disk")
    assert single.master + single.moments == single.disk == 12 * 1000


def test_weights_on_the_host() -> None:
    assert need(SHARDS, parameters="host").weights == 2 * 7000
    fp32 = [(1000, FP32)]
    assert need(fp32, parameters="host").weights == 0, "fp32 weights may be the master"
    assert need(fp32, parameters="host", home="disk").weights == 4000, "whose home the weights' is not"
    assert need(SHARDS, other_weights=123).weights == 123


def test_shards_of_several_dtypes_and_optimizers() -> None:
    one = need([(1000, BF16), (500, HostWidths(weight=4, down=4, moments=0))])
    assert one.moments == 8 * 1000 and one.master == 4 * 1500
    assert one.staging == 2 * max(2 * 1000, 4 * 500) + 2 * max(2 * 1000, 4 * 500)


def test_no_shards_need_nothing() -> None:
    assert need([]).total == need([], home="disk").total == 0


def wants(total: int, **kinds: int) -> HostNeed:
    rest = {"moments": 0, "gradients": 0, "weights": 0, "staging": 0} | kinds
    return HostNeed(master=total - sum(rest.values()), **rest)


def test_a_machine_that_is_too_small_is_told_the_sum_and_the_ways_out() -> None:
    one = HostNeed(master=4 * GB, moments=8 * GB, gradients=0, weights=0, staging=50_000_000, pins=True)
    with pytest.raises(ConfigError) as caught:
        check(dict.fromkeys(range(4), one), int(30.1 * GB), "cgroup limit")
    assert caught.value.message == (
        "host memory: 4 ranks need 4 x 12.1 GB (master 4.0, moments 8.0, staging 0.1) = 48.2 GB, of which 200.0 MB "
        "pinned; this machine has 30.1 GB free (cgroup limit)"
    )
    for way in ("more machines", "offload.fraction, about 0.62 of", 'offload.optimizer = "disk"'):
        assert way in caught.value.hint


def test_what_fits_to_the_byte_is_let_through() -> None:
    needs = {0: wants(3 * GB), 1: wants(2 * GB)}
    check(needs, 5 * GB, "memory available")
    with pytest.raises(ConfigError, match=r"2 ranks need 3\.0 GB \(master 3\.0\) \+ 2\.0 GB \(master 2\.0\) = 5\.0 GB"):
        check(needs, 5 * GB - 1, "memory available")


def test_one_rank_and_ranks_that_all_differ() -> None:
    with pytest.raises(ConfigError, match=r"1 rank needs 3\.0 GB \(master 3\.0\); this machine has 0 B free"):
        check({5: wants(3 * GB)}, 0, "x")
    with pytest.raises(ConfigError, match=r"8 ranks need 8\.0 GB .* \+ 10\.0 GB of 4 others = 36\.0 GB"):
        check({rank: wants((rank + 1) * GB) for rank in range(8)}, GB, "x")


def test_who_is_on_disk_already_is_not_sent_there() -> None:
    with pytest.raises(ConfigError) as caught:
        check({0: need([(GB, BF16)], home="disk")}, GB, "x")
    assert "disk" not in caught.value.hint and "offload.fraction" in caught.value.hint


def test_the_line_at_the_start_of_a_run() -> None:
    needs = dict.fromkeys((0, 1), need([(GB, BF16)], home="disk", pins=True))
    assert report(needs, 64 * GB, "cgroup limit") == (
        "host memory: 2 ranks need 2 x 24.6 GB (master 4.0, moments 8.0, gradients 4.0, staging 8.6) = 49.2 GB, of "
        "which 17.2 GB pinned; 64.0 GB were free (cgroup limit); 24.0 GB on disk"
    )
    assert "free" not in report(needs)


@pytest.mark.parametrize(
    ("fraction", "chosen"),
    [(1.0, [0, 1, 2, 3]), (0.6, [2, 3]), (0.61, [1, 2, 3]), (0.4, [3]), (0.01, [3]), (0.9, [1, 2, 3])],
)
def test_a_fraction_takes_the_last_buckets_rounded_up(fraction: float, chosen: list[int]) -> None:
    """Their gradients come first in backward, so they go down while it goes on."""
    assert choose([10, 30, 20, 40], fraction) == chosen


@settings(deadline=None)
@given(elements=st.lists(st.integers(64, 10**9), min_size=1, max_size=20), fraction=st.floats(0.001, 1.0))
def test_a_fraction_is_reached_and_no_bucket_is_too_many(elements: list[int], fraction: float) -> None:
    chosen = choose(elements, fraction)
    assert chosen and chosen == list(range(chosen[0], len(elements)))
    assert sum(elements[one] for one in chosen) >= fraction * sum(elements) - 0.5
    assert sum(elements[one] for one in chosen[1:]) < fraction * sum(elements)


def test_a_fraction_that_is_not_exact_in_binary_takes_no_bucket_more() -> None:
    """0.07 * 100 is a little more than 7 in floating point."""
    assert choose([93, 7], 0.07) == [1]


def test_as_few_buckets_as_the_device_asks_for() -> None:
    """Kept, an element takes 16 bytes of the device, offloaded 2."""

    def chosen(budget: float, besides: int = 0) -> list[int]:
        return choose([10, 10, 10], "auto", offloaded=2, kept=16, budget=budget, besides=besides)

    assert chosen(480) == [] and chosen(479) == [2]
    assert chosen(340) == [2] and chosen(339) == [1, 2]
    assert chosen(60) == [0, 1, 2] and chosen(440, besides=100) == [2]


def test_a_device_that_holds_not_even_the_weights_is_told_what_they_take() -> None:
    with pytest.raises(ConfigError) as caught:
        choose([20_000_000, 30_000_000], "auto", offloaded=2, kept=16, budget=50e6, besides=4_000_000)
    message = "50,000,000 elements x 2 bytes, and 4.0 MB of others = 104.0 MB"
    assert message in caught.value.message and "offload.device_mb = 50 is less" in caught.value.message
    assert "offload.device_mb to 104 or more" in caught.value.hint
    assert choose([20_000_000, 30_000_000], "auto", offloaded=2, kept=16, budget=104e6, besides=4_000_000) == [0, 1]


Tree = dict[str, str]
MIB = 1 << 20
SYSTEM = {"proc/meminfo": "MemTotal: 900 kB\nMemFree:  100 kB\nMemAvailable:     8192 kB\n"}
V2 = SYSTEM | {"proc/self/cgroup": "0::/jobs/one\n"}
V1 = SYSTEM | {"proc/self/cgroup": "3:cpuset:/\n2:cpu,memory:/jobs/one\n0::/\n"}


def group(place: str, limit: object, used: int, stat: str = "", version: int = 2) -> Tree:
    names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}[version]
    return dict(
        zip((f"{place}/{names[0]}", f"{place}/{names[1]}", f"{place}/memory.stat"), (f"{limit}\n", f"{used}\n", stat))
    )


@pytest.fixture
def machine(tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(*trees: Tree) -> Path:
        for tree in trees:
            for name, text in tree.items():
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return tmp_path

    return make


def test_a_system_of_which_nothing_is_known(machine) -> None:  # type: ignore[no-untyped-def]
    assert free_memory(machine()) is None
    assert (
        free_memory(machine({"proc/meminfo": "MemTotal: 900 kB\n", "proc/self/limits": "", "proc/self/cgroup": "x"}))
        is None
    )


def test_what_the_system_has_available(machine) -> None:  # type: ignore[no-untyped-def]
    assert free_memory(machine(SYSTEM)) == Limit(8 * MIB, "memory available")


def test_a_cgroup_without_what_it_can_drop(machine) -> None:  # type: ignore[no-untyped-def]
    stat = f"anon 5\nfile {3 * MIB}\ninactive_file {2 * MIB}\n"
    root = machine(V2, group("sys/fs/cgroup/jobs/one", 6 * MIB, 5 * MIB, stat))
    assert free_memory(root) == Limit(3 * MIB, "cgroup limit, memory.max of jobs/one")


def test_the_parents_of_a_cgroup_limit_it_too(machine) -> None:  # type: ignore[no-untyped-def]
    root = machine(
        V2,
        group("sys/fs/cgroup/jobs/one", "max", 1 * MIB),
        group("sys/fs/cgroup/jobs", 4 * MIB, 2 * MIB),
        group("sys/fs/cgroup", 7 * MIB, 3 * MIB),
    )
    assert free_memory(root) == Limit(2 * MIB, "cgroup limit, memory.max of jobs")


def test_a_cgroup_that_is_slowed_down_before_it_is_full(machine) -> None:  # type: ignore[no-untyped-def]
    tree = group("sys/fs/cgroup/jobs/one", 6 * MIB, 1 * MIB) | {"sys/fs/cgroup/jobs/one/memory.high": f"{3 * MIB}\n"}
    assert free_memory(machine(V2, tree)) == Limit(2 * MIB, "cgroup limit, memory.high of jobs/one")


def test_a_cgroup_that_is_over_its_limit_has_nothing_free(machine) -> None:  # type: ignore[no-untyped-def]
    assert of_machine(machine(V2, group("sys/fs/cgroup/jobs/one", MIB, 2 * MIB)))[0] == 0  # type: ignore[index]


def test_cgroups_of_version_1(machine) -> None:  # type: ignore[no-untyped-def]
    stat = f"cache {3 * MIB}\ninactive_file 0\ntotal_inactive_file {MIB}\n"
    root = machine(
        V1,
        group("sys/fs/cgroup/memory/jobs/one", 9223372036854771712, MIB, version=1),
        group("sys/fs/cgroup/memory/jobs", 5 * MIB, 4 * MIB, stat, version=1),
    )
    assert free_memory(root) == Limit(2 * MIB, "cgroup limit, memory.limit_in_bytes of jobs")


def test_the_mounts_of_a_container(machine) -> None:  # type: ignore[no-untyped-def]
    """It sees its own part of the tree alone, at the top of the mount, and its path is that of the whole tree."""
    mounts = "30 1 0:5 / /proc rw - proc proc rw\n31 1 0:6 /jobs /my\\040groups rw,nosuid shared:9 - cgroup2 none rw\n"
    root = machine(
        V2,
        {"proc/self/mountinfo": mounts},
        group("my groups/one", 6 * MIB, 4 * MIB),
        group("my groups", 7 * MIB, 4 * MIB),
    )
    assert free_memory(root) == Limit(2 * MIB, "cgroup limit, memory.max of one")
    elsewhere = machine({"proc/self/cgroup": "0::/../other\n"})
    assert free_memory(elsewhere) == Limit(3 * MIB, "cgroup limit, memory.max")


def test_limits_of_the_process_count_what_it_has_already(machine) -> None:  # type: ignore[no-untyped-def]
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {5 * MIB}              unlimited            bytes     \n"
        f"Max address space         {9 * MIB}              {20 * MIB}            bytes     \n"
    )
    status = f"Name:\tpython\nVmSize:\t    {6 * 1024} kB\nVmData:\t    {1024} kB\n"
    root = machine(SYSTEM, {"proc/self/limits": limits, "proc/self/status": status})
    assert of_process(root) == Limit(3 * MIB, "address space limit, ulimit -v") == free_memory(root)
    assert of_machine(root) == Limit(8 * MIB, "memory available"), "which all ranks share"
    root = machine({"proc/self/limits": limits.replace(f"{9 * MIB}", "unlimited")})
    assert of_process(root) == Limit(4 * MIB, "data size limit, ulimit -d")


def test_this_machine_is_read_without_an_error() -> None:
    found = free_memory()
    assert found is None or found.available >= 0

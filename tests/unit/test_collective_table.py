"""Tables of measured collectives become fits of a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_cluster import cluster

from autotune.cli import main
from autotune.cluster_file import cluster_yaml, read_cluster
from autotune.errors import InvalidInput
from autotune.profiling.fits.table_fits import MOST_SIZES, TableRow, table_fits
from autotune.profiling.formats.collective_table import read_collective_table

NCCL_TESTS = """\
# nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid  12345 on       host device  0 [0x07] NVIDIA A100
#  Rank  1 Group  0 Pid  12345 on       host device  1 [0x0f] NVIDIA A100
#
#    out-of-place in-place
#    size count type redop    root   time algbw busbw #wrong   time algbw busbw #wrong
#    (B)    (elements)    (us)  (GB/s)  (GB/s)    (us)  (GB/s)  (GB/s)
   1048576  262144     float  sum -1  44.21 23.72 23.72  0  45.10 23.25 23.25 0
   8388608  2097152     float  sum -1  86.90 96.53 96.53  0  87.36 96.03 96.03 0
  67108864  16777216     float  sum -1  420.0  159.78  159.78  0  418.0  160.55  160.55 0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 93.1
"""
HALVES = "ranks,bytes,seconds\n2,1000,0.001\n2,1000000,0.002\n4,1000,0.002\n4,1000000,0.004\n"


def written(folder: Path, text: str, name: str = "table.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_output_of_nccl_tests_states_its_ranks_and_its_times_in_place(tmp_path: Path) -> None:
    rows = read_collective_table(written(tmp_path, NCCL_TESTS))
    assert [row.size_bytes for row in rows] == [2**20, 2**23, 2**26]
    assert [row.seconds for row in rows] == pytest.approx([45.1e-6, 87.36e-6, 418e-6])
    assert {(row.primitive, row.ranks) for row in rows} == {("all_reduce", 2)}
    scatter = NCCL_TESTS.replace("# Using", "# Collective test starting: reduce_scatter_perf\n#")
    named = read_collective_table(written(tmp_path, scatter), ranks=4)
    assert {(row.primitive, row.ranks) for row in named} == {("reduce_scatter", 4)}


@pytest.mark.parametrize(("name", "share"), [("gather", 4), ("scatter", 4), ("all_gather", 1)])
def test_the_size_of_a_gather_or_scatter_is_that_of_one_ranks_tensor(
    tmp_path: Path, name: str, share: int
) -> None:
    """nccl-tests prints the tensors of all ranks together; plans look up what each rank sends."""
    text = NCCL_TESTS.replace("# Using", f"# Collective test starting: {name}_perf\n#")
    rows = read_collective_table(written(tmp_path, text), ranks=4)
    assert [row.size_bytes for row in rows] == [size // share for size in (2**20, 2**23, 2**26)]
    stated = f"collective,ranks,bytes,seconds\n{name},4,4096,0.01\n"
    assert read_collective_table(written(tmp_path, stated)) == (TableRow(name, 4, 4096, 0.01),)


def unnamed(redop: str, root: int, link_share: float) -> str:
    """The output of a test whose largest row has this share of bandwidth on the busiest link."""
    text = NCCL_TESTS.replace("sum -1", f"{redop} {root}")
    for algorithm in ("159.78", "160.55"):
        link = f"{float(algorithm) * link_share:.2f}"
        text = text.replace(f"{algorithm}  {algorithm}", f"{algorithm}  {link}")
    return text


@pytest.mark.parametrize(
    ("redop", "root", "link_share", "ranks"),
    [("none", -1, 7 / 8, 8), ("sum", -1, 7 / 8, 8), ("none", 0, 1.0, 2), ("sum", 0, 1.0, 2)],
)
def test_output_without_a_name_is_an_all_reduce_only_if_its_bandwidths_are(
    tmp_path: Path, redop: str, root: int, link_share: float, ranks: int
) -> None:
    """Times of an all-gather became fits of an all-reduce."""
    (*_, row) = read_collective_table(written(tmp_path, unnamed("sum", -1, 2 * 7 / 8)), ranks=8)
    assert (row.primitive, row.ranks) == ("all_reduce", 8)
    path = written(tmp_path, unnamed(redop, root, link_share))
    with pytest.raises(InvalidInput, match=r"line 11 is not of an all-reduce .* --primitive"):
        read_collective_table(path, ranks=ranks)
    (*_, row) = read_collective_table(path, ranks=ranks, primitive="all_gather")
    assert (row.primitive, row.ranks) == ("all_gather", ranks)


def test_ranks_of_nccl_tests_are_counted_once_and_must_be_of_one_test(tmp_path: Path) -> None:
    """Processes without MPI are tests of one rank each, and counted as the ranks of one."""
    device = next(line for line in NCCL_TESTS.splitlines() if "Rank  0" in line)
    repeated = NCCL_TESTS.replace(device, f"{device}\n{device.replace('12345', '99')}")
    assert read_collective_table(written(tmp_path, repeated))[0].ranks == 2
    alone = NCCL_TESTS.replace("Rank  1", "Rank  0")
    with pytest.raises(InvalidInput, match="lists rank 0 on several devices; build nccl-tests"):
        read_collective_table(written(tmp_path, alone))


@pytest.mark.parametrize(
    ("header", "time", "unit_s"),
    [("size(B),time(ns)", 5.0, 1e-9), ("bytes,time_us", 5.0, 1e-6), ("size,seconds", 5.0, 1.0)],
)
def test_columns_of_a_csv_are_found_by_name(
    tmp_path: Path, header: str, time: float, unit_s: float
) -> None:
    (row,) = read_collective_table(written(tmp_path, f"{header}\n1024,{time}\n"), ranks=2)
    assert row == TableRow("all_reduce", 2, 1024, time * unit_s)


def test_a_csv_states_ranks_and_collectives(tmp_path: Path) -> None:
    fits = table_fits(read_collective_table(written(tmp_path, HALVES)))
    assert [(fit.primitive, fit.group_size, fit.sizes) for fit in fits] == [
        ("all_reduce", 2, 2),
        ("all_reduce", 4, 2),
    ]
    assert fits[0].seconds(1_000_000) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "needs columns for the size and the time"),
        ("bytes,seconds\n1,0.1\n", "name it with --ranks"),
        ("ranks,bytes,seconds\n2,1,zero\n", r"line 2: a time must be a number above 0"),
        ("ranks,bytes,seconds\n2,1,0.5\n2,1,-1\n", r"line 3: a time must be"),
        ("ranks,bytes,seconds\n2,1.5,1\n", r"line 2: size must be a whole number"),
        ("ranks,bytes,seconds\n2,nan,1\n", r"line 2: size must be a whole number"),
        ("ranks,bytes,seconds\n1,1,1\n", "need 2 to"),
        ("ranks,bytes,seconds\n2,1\n", "line 2: a row needs 3 cells, but has 2"),
        ("collective,ranks,bytes,seconds\ngossip,2,1,1\n", "must be one of all_reduce"),
        ("ranks,bytes,seconds\n", "has no row of numbers"),
        (f"ranks,bytes,seconds\n2,{'1' * 200_000},1\n", r"line 2 must be CSV, .* field limit"),
        ("", "but has no header"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read_collective_table(written(tmp_path, text))


def test_a_fit_needs_two_sizes_and_bounds_its_search() -> None:
    with pytest.raises(InvalidInput, match="at least two sizes"):
        table_fits([TableRow("all_reduce", 2, 1024, 1e-3)])
    sizes = [2**20 * n for n in range(1, 400)]
    (fit,) = table_fits([TableRow("all_reduce", 2, n, 1e-5 + n / 1e10) for n in sizes])
    assert fit.sizes == 399 > MOST_SIZES
    assert fit.large_error is not None and fit.large_error < 1e-3


def test_the_command_adds_fits_to_a_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(tmp_path, cluster_yaml(cluster((4, 1000.0))), "cluster.yaml")
    table, out = written(tmp_path, HALVES), tmp_path / "fitted.yaml"
    words = ["probe", "--from-table", str(table), "--cluster", str(given), "-o", str(out)]
    assert main(words) == 0
    assert "all_reduce" in capsys.readouterr().out
    fitted = read_cluster(out)
    assert fitted.source == "measured"
    fit = fitted.fit("all_reduce", 4)
    assert fit is not None and fit.seconds(1_000_000) == pytest.approx(0.004)
    assert main(["probe", "--from-table", str(table)]) != 0
    assert "needs the cluster that it was measured on" in capsys.readouterr().err

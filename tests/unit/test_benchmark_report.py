"""Tables, documents and plots of the benchmark's figures."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

from cutlass_ops.benchmark import plot_style, plots, report, rows, sections, tables
from cutlass_ops.benchmark.cases import BenchmarkError
from cutlass_ops.benchmark.cli import main

from .benchmark_record import BYTES, FLOPS, LIMITS, record, row

REPOSITORY = Path(__file__).resolve().parents[2]
COSTS = json.loads((REPOSITORY / "cutlass_ops" / "plan_costs.json").read_text())


@pytest.fixture
def result():
    return record()


def performance(result):
    """All generated text of docs/performance.md."""
    return "\n".join(sections.performance(result, COSTS, set(plots.figures(result, COSTS))).values())


# ---- tables and documents ------------------------------------------------------------------------------------------------


def test_tables_as_text_and_markdown():
    table = tables.Table("title", ("", "ms"), (("a", "1.0"), ("long|name", "10.0")))
    assert tables.plain(table) == "title\n             ms\na           1.0\nlong|name  10.0"
    assert tables.markdown(table) == "**title**\n\n|  | ms |\n| --- | ---: |\n| a | 1.0 |\n| long\\|name | 10.0 |"


def test_every_figure_is_in_the_document(result):
    text = performance(result)
    assert "NVIDIA H200, driver unknown, PyTorch 2.11.0 (CUDA 13.0), Python 3.12.3" in text
    assert "commit 0123456789ab with changes, `python scripts/bench.py`, 100 trials, 2.5 ms idle before each." in text
    assert "copy 4000 GB/s" in text
    for group in rows.grouped(result["rows"]):
        assert f"**{rows.input_name(group[0])}, 100 trials**" in text
    ours = next(line for line in text.splitlines() if line.startswith("| cutlass_ops two-kernel-f16-guarded (default) |"))
    assert "| 1.0000 |" in ours
    assert "| 2.00 | 5.00 | 50.0% | 3.00e-04 | 4.00e-05 | 1500 | yes |" in ours
    assert "| pool_avg_f32 (idle) |" in text
    assert "| sum | 1.0000 |" in text
    assert "| eager module | 50.0 | 49.0 | 48.0 |" in text
    assert "| cutlass_ops | - | 10.00 | 60.00 | 1.50 | 3 |" in text
    assert "CUDA graphs were not measured in these figures." in text


def test_a_graph_is_beside_the_sum_of_its_launches(result):
    graph = row("", 1.0, "fused-f16", launches=2, replay_us=16.5, launches_us=15.0, empty_us=1.5)
    text = sections.performance(result | {"graphs": [graph]}, COSTS, ())["overhead"]
    assert "float32 NCHW, fused-f16 | 2 | 16.50 | 15.00 | 1.50 |" in text


def test_a_call_between_the_others_is_beside_its_launches_alone(result):
    result["stages"] = [stage | {"plan": "two-kernel-f16-guarded"} for stage in result["stages"]]
    assert "two-kernel-f16-guarded (default) | 1.0000 | 1.0000 | 1.0000 | 1.0000 |" in sections.performance(result, COSTS, ())["clock"]


def test_what_was_not_timed_is_said(result):
    text = performance(result | {"refused": ["p: too wrong"], "not_run": ["q: did not compile"], "failed": ["r: lost"]})
    assert "Not timed: p: too wrong" in text
    assert "Not timed: q: did not compile" in text
    assert "Failed: r: lost" in text


def test_figures_show_the_problems_own_size_and_the_plan_that_a_call_takes(result):
    text = sections.figures(result)
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert lines == ["| `conv2d_sub_tanh_sub_avgpool` | 5.000 | 2.000 | **1.000** | 1.600 | 2.00 | 50% |"]
    assert "| ms | PyTorch eager | torch.compile | cutlass_ops two-kernel-f16-guarded | cutlass_ops two-kernel-tf32 |" in text


def test_a_partial_record_renders(result):
    result |= {"stages": [], "host": [], "cold_start": [], "rows": rows.complete([row("eager", 5.0)], FLOPS, BYTES, LIMITS)}
    assert "| eager | 5.0000 |" in performance(result)
    assert "| `conv2d_sub_tanh_sub_avgpool` | 5.000 | - | - | - |" in sections.figures(result)


def test_replace_region_replaces_that_and_nothing_else():
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n"
    once = report.replace_region(text, "x", "new\n")
    assert once == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n"
    assert report.replace_region(once, "x", "new") == once


@pytest.mark.parametrize("text", ["", "<!-- x -->", "<!-- /x --> <!-- x -->", "<!-- x --><!-- /x --><!-- x --><!-- /x -->"])
def test_replace_region_needs_exactly_one(text):
    with pytest.raises(BenchmarkError, match="expected one region <!-- x -->"):
        report.replace_region(text, "x", "new")


def checkout(root: Path, result) -> Path:
    regions = "".join(f"<!-- {name} -->\n<!-- /{name} -->\nkept\n" for name in sections.performance(result, COSTS, ()))
    (root / "docs").mkdir()
    (root / "docs" / "performance.json").write_text(report.dumps(result))
    (root / "docs" / "performance.md").write_text(f"by hand\n{regions}")
    (root / "README.md").write_text("# Name\n<!-- figures -->\n<!-- /figures -->\nend\n")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_render_makes_documents_and_plots_without_a_gpu_and_again_the_same_bytes(tmp_path, result, capsys):
    root = checkout(tmp_path, result)
    assert main(root, ["--render"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"wrote {root / 'docs' / 'performance.md'}", f"wrote {root / 'README.md'}"]
    first = contents(root)
    assert first["docs/performance.md"].startswith(b"by hand\n<!-- time -->\n![Milliseconds")
    assert first["docs/performance.md"].endswith(b"<!-- /selection -->\nkept\n")
    assert b"![Milliseconds of every competitor for problem 46, float32 NCHW](docs/plots/time.svg)" in first["README.md"]
    drawn = {plot.name for plot in plots.PLOTS} - {"inputs", "start"}
    assert {name for name in first if "plots" in name} == {f"docs/plots/{name}{suffix}" for name in drawn for suffix in (".svg", ".png")}
    with mpl.rc_context({"font.size": 20, "svg.hashsalt": None, "axes.facecolor": "red"}):  # a user's settings
        assert main(root, ["--render"]) == 0
    assert contents(root) == first


def test_render_elsewhere_takes_the_frame_and_leaves_the_readme(tmp_path, result):
    root = checkout(tmp_path, result)
    out = tmp_path / "elsewhere"
    out.mkdir()
    (out / "performance.json").write_text(report.dumps(result))
    before = (root / "README.md").read_text()
    assert main(root, ["--render", "--out", str(out)]) == 0
    assert "NVIDIA H200" in (out / "performance.md").read_text()
    assert (out / "plots" / "time.svg").exists()
    assert (root / "README.md").read_text() == before


def test_render_changes_nothing_where_a_region_is_missing(tmp_path, result, capsys):
    root = checkout(tmp_path, result)
    (root / "README.md").write_text("# Name\n")
    before = contents(root)
    assert main(root, ["--render"]) == 1
    assert "README.md: expected one region <!-- figures -->" in capsys.readouterr().err
    assert contents(root) == before


def test_a_plot_whose_data_is_gone_is_removed_and_the_document_says_so(tmp_path, result):
    root = checkout(tmp_path, result)
    assert main(root, ["--render"]) == 0
    (root / "docs" / "performance.json").write_text(report.dumps(result | {"rows": result["rows"][:5]}))
    assert main(root, ["--render"]) == 0
    assert not list((root / "docs" / "plots").glob("batch.*"))
    assert "No plot: problem 46 at two batch sizes was not measured in these figures." in (root / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": 0}'])
def test_render_needs_figures_of_this_schema(tmp_path, text, capsys):
    (tmp_path / "docs").mkdir()
    if text is not None:
        (tmp_path / "docs" / "performance.json").write_text(text)
    assert main(tmp_path, ["--render"]) == 1
    assert capsys.readouterr().err.startswith("error: expected ")


def test_the_record_survives_json(result):
    assert json.loads(report.dumps(result))["rows"][0]["what"] == "eager"


# ---- plots ---------------------------------------------------------------------------------------------------------------


def texts(figure):
    """Every text of a figure, in the order drawn."""
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


def test_each_plot_says_where_when_and_how_it_was_measured(result):
    for name, figure in plots.figures(result, COSTS).items():
        footer = next(text for text in texts(figure) if text.startswith("NVIDIA H200, driver"))
        assert "PyTorch 2.11.0 (CUDA 13.0), Python 3.12.3\n2026-01-02, commit 0123456789ab with changes, python scripts/bench.py" in footer
        assert "100 trials, 2.5 ms idle before each" in footer
        assert ("python scripts/sweep.py" in footer) == (name == "roofline")


def test_bars_are_as_long_as_the_figures(result):
    figure = plots.figures(result, COSTS)["time"]
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [5.0, 2.0, 2.2, 1.0, 1.6]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "eager"
    assert names[3] == "cutlass_ops two-kernel-f16-guarded (default)"
    assert "ms, mean; dashed: the GPU's limit, 0.500" in texts(figure)


def test_nothing_passes_the_roofs_lines_but_by_its_figures(result):
    (axes,) = plots.figures(result, COSTS)["roofline"].axes
    roof = next(line for line in axes.lines if str(line.get_label()).startswith("DRAM copy 4000 GB/s, fp16 matmul 800 TFLOP/s"))
    knee = roof.get_xdata()[1], roof.get_ydata()[1]
    assert knee == (200.0, 800.0)
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"]
    assert (pytest.approx(400.0), pytest.approx(400.0)) in points  # 400 GFLOP, 1 GB, 1 ms


def test_a_plot_of_a_start_or_memory_that_was_measured_appears(result):
    start = result["cold_start"][0]
    result["cold_start"].append(start | {"what": "torch.compile default", "cache": "empty", "import_ms": 0.0, "first_call_ms": 9000.0})
    found = texts(plots.figures(result, COSTS)["start"])
    assert "10 + 60 ms" in found
    assert "9000 ms" in found
    assert "torch.compile default, empty cache" in found


def luminance(colour):
    """Relative luminance as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mpl.colors.to_rgb(colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_colours_stand_out_on_white_and_on_black(background):
    def contrast(colour):
        low, high = sorted((luminance(colour), luminance(background)))
        return (high + 0.05) / (low + 0.05)

    assert contrast(plot_style.INK) >= 4
    for colour in (plot_style.OURS, plot_style.OTHERS, plot_style.COMPILED, plot_style.EAGER):
        assert contrast(colour) >= 3


# ---- this repository's documents -----------------------------------------------------------------------------------------


def test_the_tracked_documents_and_plots_are_those_of_the_tracked_figures(tmp_path):
    """With the versions of scripts/constraints.txt; `python scripts/bench.py --render` makes them."""
    for name in ("README.md", "docs/performance.md", "docs/performance.json"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((REPOSITORY / name).read_bytes())
    assert main(tmp_path, ["--render"]) == 0
    found = contents(tmp_path)
    assert len(found) > 3
    different = [name for name, data in found.items() if data != (REPOSITORY / name).read_bytes()]
    assert different == [], f"made by matplotlib {mpl.__version__}"
    assert {path.name for path in (REPOSITORY / "docs" / "plots").iterdir()} == {Path(name).name for name in found if "plots" in name}

"""Reports: the statistics by hand, the tables against the runs, what is refused, and the page in a real browser."""

import csv
import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from crosscurrent.experiments.aggregate import Score, collect
from crosscurrent.experiments.grid import open_grid
from crosscurrent.experiments.kinds import run_any as run
from crosscurrent.experiments.report import write_report
from crosscurrent.experiments.report.figures import style_of
from crosscurrent.experiments.report.page import KINDS
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.study import Study, load_study, shipped_studies
from tests.recipes import MODELS, study_defaults, tiny_recipe

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STUDY: dict[str, Any] = {
    "description": "small",
    "seeds": [1, 2, 3],
    "defaults": study_defaults("transformer", training={"max_steps": 2}),
    "tasks": {
        "parity": {},
        "swaps": {"task": {"name": "s5_swaps", "test_lengths": [32, 64], "validation_lengths": [9]}},
    },
    "models": {"transformer": {}, "rlt-1": {"model": MODELS["rlt-1"]}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one cell, two of another, one of a third; a run that is not finished."""
    output = tmp_path_factory.mktemp("study") / "runs"
    study = Study(**STUDY)
    plan = study.plan("s")
    open_grid(output, "small", study, plan)
    left_out = {"parity/rlt-1/seed-3", "swaps/transformer/seed-3", "swaps/rlt-1/seed-2", "swaps/rlt-1/seed-3"}
    for planned in plan:
        if planned.name not in left_out:
            run(planned.recipe, output / planned.name)
    (output / "swaps/rlt-1/seed-1/result.json").unlink()
    return output


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("report")
    write_report(collect([runs]), output)
    return output


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_scores_by_hand() -> None:
    score = Score("t", "m", 64, "final", {1: 0.5, 2: 0.75, 3: 1.0}, num_asked=3)
    assert score.mean == 0.75 and score.standard_deviation == 0.25  # sqrt((1/16 + 0 + 1/16) / 2)
    assert (score.text, score.remark) == ("75.00 ± 25.00", "")
    one = Score("t", "m", 64, "final", {1: 0.5}, num_asked=3)
    assert (one.text, one.remark) == ("50.00", "1 of 3 seeds")
    assert Score("t", "m", 64, "final", {1: 0.5}, num_asked=None).remark == ""


def test_tables_repeat_what_the_runs_measured(runs: Path, report: Path) -> None:
    seeds = read_csv(report / "tables" / "seeds.csv")
    assert {(row["task"], row["model"]) for row in seeds} == {
        ("parity", "transformer"),
        ("parity", "rlt-1"),
        ("swaps", "transformer"),
    }
    for row in seeds:
        result = RunFolder(runs / row["task"] / row["model"] / f"seed-{row['seed']}").result()
        assert float(row["value_percent"]) == pytest.approx(
            100 * result["test"][row["length"]][row["metric"]], abs=1e-3
        )
    for row in read_csv(report / "tables" / "scores.csv"):
        key = ("task", "model", "length", "metric")
        values = [float(one["value_percent"]) for one in seeds if all(one[name] == row[name] for name in key)]
        assert len(values) == int(row["num_seeds"]) and row["num_seeds_asked"] == "3"
        assert float(row["mean_percent"]) == pytest.approx(statistics.fmean(values), abs=1e-3)
        if len(values) > 1:
            assert float(row["standard_deviation_percent"]) == pytest.approx(statistics.stdev(values), abs=1e-3)
    for name in ("scores", "seeds", "runs"):
        table = json.loads((report / "tables" / f"{name}.json").read_text())
        assert len(table) == len(read_csv(report / "tables" / f"{name}.csv"))


def test_the_page_says_which_seeds_are_missing(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert "2 of 3 seeds" in page and "3 of 3" not in page
    assert "Not finished" in page and "swaps/rlt-1/seed-1" in page
    assert "(published)" in page and "66.76 ± 28.78" in page


def test_the_same_runs_give_the_same_files(runs: Path, report: Path, tmp_path: Path) -> None:
    for written in write_report(collect([runs]), tmp_path):
        assert written.read_bytes() == (report / written.relative_to(tmp_path)).read_bytes(), written.name


def test_the_page_needs_nothing_but_itself(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*""", page.replace("xlink:href", "href"))
    assert "<script" not in page and "@import" not in page and not re.findall(r"url\((?!#)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "two elements share an id"
    for used in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert used in ids


def in_browser(page: Path, width: int) -> dict[str, Any]:
    """The page laid out at a width, and what a script measures of it."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no chromium")
    measure = """
      <script>
        const box = (e) => e.getBoundingClientRect();
        const found = {
          page: document.documentElement.scrollWidth, window: window.innerWidth,
          figures: [...document.querySelectorAll('svg')].map(e => [box(e).width, box(e).height]),
          rows: document.querySelectorAll('tbody tr').length, font: parseFloat(getComputedStyle(document.body).fontSize),
          marks: document.querySelectorAll('svg use, svg path').length,
        };
        document.body.innerHTML = '<pre id="found">' + JSON.stringify(found) + '</pre>';
      </script>"""
    probe = page.with_name(f"probe-{width}.html")
    probe.write_text(page.read_text().replace("</body>", measure + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    dom = subprocess.run(
        [browser, *options, probe.as_uri()], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    match = re.search(r'<pre id="found">(.*?)</pre>', dom)
    assert match is not None
    return json.loads(match.group(1))


@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_shows_it_without_sideways_scrolling(report: Path, width: int, tmp_path: Path) -> None:
    """500 is the narrowest window that headless chromium opens."""
    shutil.copy(report / "report.html", tmp_path / "report.html")
    found = in_browser(tmp_path / "report.html", width)
    assert found["page"] <= found["window"] <= width
    assert len(found["figures"]) == 4 and all(w > 300 and h > 150 for w, h in found["figures"])
    assert found["rows"] > 10 and found["font"] >= 14 and found["marks"] > 50


def test_runs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for seed, steps in ((1, 1), (2, 2)):
        run(tiny_recipe("transformer", training={"max_steps": steps}, seed=seed), tmp_path / f"parity/a/seed-{seed}")
    with pytest.raises(ValueError, match=r"max_steps: 1 -> 2"):
        collect([tmp_path])
    shutil.rmtree(tmp_path / "parity/a/seed-2")
    run(tiny_recipe("transformer", training={"max_steps": 1}, seed=2), tmp_path / "parity/a/seed-2")
    assert len(collect([tmp_path]).runs) == 2
    with pytest.raises(ValueError, match="twice"):
        collect([tmp_path, tmp_path / "parity"])
    versions = tmp_path / "parity/a/seed-2/versions.json"
    versions.write_text(json.dumps(json.loads(versions.read_text()) | {"crosscurrent": "0.0.1"}))
    with pytest.raises(ValueError, match=r"crosscurrent .* -> 0\.0\.1"):
        collect([tmp_path])


def test_folders_without_finished_runs_are_refused(tmp_path: Path, runs: Path) -> None:
    with pytest.raises(ValueError, match="no runs"):
        collect([tmp_path])
    with pytest.raises(ValueError, match="not a folder"):
        collect([tmp_path / "absent"])
    with pytest.raises(ValueError, match="none of the 1 runs is finished"):
        write_report(collect([runs / "swaps" / "rlt-1"]), tmp_path / "report")
    assert not (tmp_path / "report").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write_report(collect([runs]), tmp_path / "file")


def test_models_are_shown_in_the_order_of_their_study(tmp_path: Path) -> None:
    study = Study(**STUDY)
    plan = study.plan("s", tasks=["parity"], seeds=[1])
    open_grid(tmp_path, "s", study, plan)
    for planned in plan:
        run(planned.recipe, tmp_path / planned.name)
    assert [found.model for found in collect([tmp_path]).runs] == ["transformer", "rlt-1"]


def test_all_models_of_a_study_look_different() -> None:
    for path in shipped_studies().values():
        models = list(load_study(path).models)
        styles = {tuple(style_of(model, models).values()) for model in models}
        assert len(styles) == len(models)


def test_labels_do_not_depend_on_where_one_looks(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {run.name: run for run in collect([runs]).runs}
    for folder in (runs / "parity", runs / "parity" / "rlt-1", runs / "parity" / "rlt-1" / "seed-1", runs.parent):
        for run_found in collect([folder]).runs:
            if run_found.name in whole:
                assert run_found == whole[run_found.name] and run_found.num_seeds_asked == 3
    monkeypatch.chdir(runs / "parity" / "rlt-1" / "seed-1")
    assert [run_found.name for run_found in collect([Path()]).runs] == ["parity/rlt-1/seed-1"]


def test_labels_with_dots_keep_their_files_apart_and_old_figures_go(tmp_path: Path) -> None:
    study = Study(**(STUDY | {"tasks": {"parity.a": {}, "parity.b": {}}}))
    plan = study.plan("s", models=["transformer"], seeds=[1])
    open_grid(tmp_path / "runs", "s", study, plan)
    for planned in plan:
        run(planned.recipe, tmp_path / "runs" / planned.name)
    write_report(collect([tmp_path / "runs"]), tmp_path / "report")
    names = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert names == {f"parity.{x}_{kind}.{form}" for x in "ab" for kind in KINDS for form in ("png", "svg")}
    shutil.rmtree(tmp_path / "runs" / "parity.b")
    written = write_report(collect([tmp_path / "runs"]), tmp_path / "report")
    names = {path.name for path in (tmp_path / "report" / "figures").iterdir()}
    assert len(names) == 4 and {path.name for path in written} >= names


@pytest.mark.parametrize(("file", "content"), [("result.json", "{}"), ("result.json", "["), ("versions.json", "[]")])
def test_damaged_files_are_named(file: str, content: str, tmp_path: Path) -> None:
    run(tiny_recipe("transformer", training={"max_steps": 1}), tmp_path / "a")
    (tmp_path / "a" / file).write_text(content)
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        collect([tmp_path])


def test_other_test_sets_do_not_stand_in_one_table(tmp_path: Path) -> None:
    run(tiny_recipe("transformer", training={"max_steps": 1}), tmp_path / "a")
    run(tiny_recipe("lstm", training={"max_steps": 1}, task={"num_test": 6}), tmp_path / "b")
    with pytest.raises(ValueError, match=r"task\.num_test: 12 -> 6"):
        collect([tmp_path])
    shutil.rmtree(tmp_path / "b")
    run(tiny_recipe("lstm", training={"max_steps": 1}, task={"train_lengths": [3, 4]}), tmp_path / "b")
    write_report(collect([tmp_path]), tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<td>3–4</td>" in page and "<td>3–40</td>" in page and "12 test sequences" in page

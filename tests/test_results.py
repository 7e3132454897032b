"""The committed evidence: its tables and page are what `crosscurrent report` makes of its runs, untouched by hand."""

from pathlib import Path

import pytest

from crosscurrent.experiments.aggregate import collect
from crosscurrent.experiments.finetuning.report import read_comparisons, write_comparison
from crosscurrent.experiments.report.tables import run_table, score_table, seed_table, write_table
from crosscurrent.experiments.study import find_recipe, load_study, shipped_studies

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize("name", ["rlt-mini", "rlt-beyond", "s5-retrieval-mini"])
def test_tables_are_made_from_the_runs(name: str, tmp_path: Path) -> None:
    collection = collect([RESULTS / name / "runs"])
    tables = {"scores": score_table(collection), "seeds": seed_table(collection), "runs": run_table(collection)}
    for table, rows in tables.items():
        write_table(rows, tmp_path / table)
        for form in ("csv", "json"):
            committed = RESULTS / name / "tables" / f"{table}.{form}"
            assert (tmp_path / f"{table}.{form}").read_text() == committed.read_text(), committed
    page = (RESULTS / name / "report.html").read_text()
    for task in collection.tasks:
        for score in collection.scores(task):
            assert score.text in page and score.remark in page


def test_runs_are_those_of_the_shipped_recipes() -> None:
    """What is committed can be run again by the commands beside it."""
    studies = {"rlt/mini": "rlt-mini", "rlt/beyond/mini": "rlt-beyond", "s5_retrieval/mini": "s5-retrieval-mini"}
    for study, name in studies.items():
        planned = {run.name: run.recipe for run in load_study(shipped_studies()[study]).plan(study)}
        for run in collect([RESULTS / name / "runs"]).finished:
            assert planned[run.name] == run.recipe, run.name


@pytest.mark.parametrize("folder", sorted(path.parent for path in (RESULTS / "reasoning").glob("*/comparison.json")))
def test_comparisons_are_made_from_the_runs(folder: Path, tmp_path: Path) -> None:
    entries = read_comparisons([folder])[folder]
    write_comparison(entries, tmp_path)
    for name in ("comparison.json", "comparison.md"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), folder / name
    shipped = find_recipe(
        f"reasoning/mini/{folder.name}/retrofit", {"problems": {"data": entries[0].recipe.problems.data}}
    )
    assert shipped[1] == entries[0].recipe

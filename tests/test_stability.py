"""Stability: measurements against predictions made by hand, the rules of the verdicts, and the command on real runs."""

import csv
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from crosscurrent.cli.main import app
from crosscurrent.data.generated import inputs_for
from crosscurrent.evaluation.scoring import Examples
from crosscurrent.evaluation.stability import (
    Positions,
    Rate,
    attention_cuts,
    configured,
    measure_positions,
    state_of,
)
from crosscurrent.experiments.kinds import run_any as run
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run import build_model
from crosscurrent.experiments.settings import validated
from crosscurrent.experiments.stability import measure_runs, write_stability
from crosscurrent.experiments.stability.runs import Measured
from crosscurrent.experiments.stability.verdict import Findings, findings_of, verdict
from crosscurrent.recurrence import Sequential
from crosscurrent.tasks import IGNORED, get_task
from tests.recipes import tiny_recipe, tiny_values

TRAINED = 40  # the last position of the training lengths, in what is made by hand


def of_errors(wrong: Tensor, asked: Tensor | None = None) -> Positions:
    """Answers [N, T] that are wrong where it is said, with margins of 2 where they are right."""
    asked = torch.ones_like(wrong) if asked is None else asked
    return Positions(asked, ~wrong, torch.where(wrong, -1.0, 2.0), torch.full(wrong.shape, 3.0))


def with_first_errors(hazard: Tensor, num_examples: int = 2000) -> Positions:
    """Sequences that err for the first time with a given hazard [T] at each position, and at all later ones."""
    numbers = torch.rand(num_examples, len(hazard), generator=torch.Generator().manual_seed(3))
    return of_errors((numbers < hazard).cummax(dim=1).values)


def judged(found: Positions, trained: Positions | None = None, every_prefix: bool = True) -> Findings:
    perfect = of_errors(torch.zeros(100, TRAINED + 1, dtype=torch.bool))
    return findings_of(trained or perfect, found, TRAINED, every_prefix, chance=0.1)


def test_first_errors_survival_and_hazard_by_hand() -> None:
    wrong = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]).bool()
    asked = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    found = of_errors(wrong, asked)
    assert found.first_errors.tolist() == [5, 2, 2, 1]
    rows = {at.position: at for at in found.by_position}
    assert list(rows) == [1, 2, 3, 4]  # nothing is asked at 0
    assert [at.num_asked for at in rows.values()] == [3, 4, 4, 4]
    assert [at.right for at in rows.values()] == pytest.approx([2 / 3, 1 / 2, 3 / 4, 3 / 4])
    assert [at.without_error for at in rows.values()] == [0.75, 0.25, 0.25, 0.25]
    assert [at.hazard for at in rows.values()] == [Rate(1, 3), Rate(2, 3), Rate(0, 1), Rate(0, 1)]
    assert found.hazard() == Rate(3, 8) and found.hazard(0, 2) == Rate(1, 3)
    assert (found.right_share, found.without_error) == (pytest.approx(10 / 15), 0.25)
    assert found.right_after_error == pytest.approx(5 / 7)
    assert (found.erred_by(0.25), found.erred_by(0.5), found.erred_by(0.75), found.erred_by(0.9)) == (1, 2, 2, None)


def test_an_error_where_nothing_is_asked_is_none() -> None:
    wrong = torch.tensor([[True, False, True]])
    found = of_errors(wrong, torch.tensor([[False, True, False]]))
    assert found.without_error == 1 and found.right_after_error is None and Rate(0, 0).value is None


def test_margins_and_norms_by_hand() -> None:
    margins = torch.tensor([[1.0, 5.0], [2.0, -4.0], [3.0, 7.0], [-1.0, 9.0]])
    norms = torch.tensor([[1.0, 2.0], [3.0, 2.0], [1.0, 2.0], [3.0, 2.0]])
    found = Positions(torch.ones(4, 2, dtype=torch.bool), margins > 0, margins, norms)
    first, second = found.by_position
    assert (first.norm_mean, first.norm_deviation, second.norm_deviation) == (2.0, 1.0, 0.0)
    assert first.margin_low == pytest.approx(-1 + 0.15 * 2)  # 5 % of the way through four values
    assert second.margin_median_unerring == 5.0  # of 5, -4 and 7: the last sequence erred before
    assert found.unerring_margin(found.last_tenth) == 5.0


def test_a_constant_hazard_is_the_same_in_both_halves_and_their_chances_are_equal() -> None:
    found = with_first_errors(torch.full((300,), 0.01))
    early, late = found.halves
    assert early.chances == pytest.approx(late.chances, rel=0.05)
    for rate in (early, late):
        assert rate.value == pytest.approx(0.01, rel=0.1)
    assert found.erred_by(0.5) == pytest.approx(69, abs=4)  # ln 2 / 0.01


HAZARDS = {
    "slips": torch.full((300,), 0.004),
    "drift": torch.linspace(0, 0.02, 300),
    "length dependence": torch.cat([torch.full((41,), 1e-5), torch.full((259,), 0.05)]),
    "early errors": torch.cat([torch.full((60,), 0.002), torch.full((240,), 0.00005)]),
    "stable": torch.full((300,), 1e-6),
}


@pytest.mark.parametrize("kind", HAZARDS)
def test_each_course_of_errors_has_its_verdict(kind: str) -> None:
    trained = with_first_errors(HAZARDS[kind][: TRAINED + 1])
    assert verdict(judged(with_first_errors(HAZARDS[kind]), trained)).kind == kind


def test_slips_tell_how_far_apart_they_are_and_what_follows() -> None:
    found = judged(with_first_errors(torch.full((300,), 0.004), 8000))
    match = re.search(r"one in ([\d,]+) supervised positions", verdict(found).text)
    assert match is not None and int(match.group(1)) == pytest.approx(250, rel=0.05)
    assert "the state is lost" in verdict(found).text
    assert "It recovers" in verdict(replace(found, right_after_error=0.97)).text
    assert "in part" in verdict(replace(found, right_after_error=0.5)).text


def test_never_learned_is_told_from_never_asked() -> None:
    trained = of_errors(torch.arange(100)[:, None].expand(100, TRAINED + 1) < 20)  # 80 % right
    found = with_first_errors(HAZARDS["drift"])
    assert verdict(judged(found, trained)).kind == "never learned"
    assert verdict(judged(found, trained, every_prefix=False)).kind == "not asked"
    short = replace(judged(found, trained), stopped_at=4, trained_length=8)
    assert verdict(short).kind == "stopped short" and "grew to 4 only" in verdict(short).text


def test_a_falling_margin_is_drift_though_the_hazard_is_constant() -> None:
    found = judged(with_first_errors(HAZARDS["slips"]))
    assert verdict(replace(found, margin_end=1.1)).kind == "slips"
    told = verdict(replace(found, margin_end=0.9, norm_end=3.9))
    assert told.kind == "drift" and "from 2.0 to 0.9" in told.text and "+30 %" in told.text


def test_attention_is_to_blame_if_half_of_the_loss_comes_back() -> None:
    found = replace(judged(with_first_errors(HAZARDS["drift"])), right=0.5, right_trained=1.0)
    some = replace(found, cuts={"encoder": 0.55, "memory": 0.8, "encoder and memory": 0.7})
    assert some.rescue == "memory" and "memory attention" in verdict(some).text
    none = replace(found, cuts={"encoder": 0.7})
    assert none.rescue is None and "does not help" in verdict(none).text
    assert found.rescue is None and "attention" not in verdict(found).text


@pytest.mark.parametrize(
    ("model", "task"),
    [("rlt-1", "addition"), ("rlt-0", "mod5_flat"), ("t2mlr", "s5_retrieval"), ("lstm", "parity")],
)
def test_measured_is_what_the_model_says(model: str, task: str) -> None:
    """Against logits of the same model, example by example, whatever the task supervises and however it is batched."""
    values = tiny_values(model) | {"task": {"name": task}}
    net = build_model(validated(Recipe, values, "tiny")).eval()
    length = {"addition": 4, "s5_retrieval": 2}.get(task, 9)
    examples = Examples(get_task(task), "test", (length,), 5, 1, True, batch_size=2, solver=_solver(model))
    found = measure_positions(net, examples, length)
    for row, batch in enumerate(replace(examples, batch_size=1).of_length(length)):
        with torch.no_grad():
            logits = net(**inputs_for(net, batch), use_cache=False, **examples.options).logits[0]
        labels = batch["labels"][0]
        asked = (labels != IGNORED).nonzero().flatten()
        assert found.asked[row].nonzero().flatten().tolist() == asked.tolist()
        for position in asked.tolist():
            right = labels[position]
            others = torch.cat([logits[position, :right], logits[position, right + 1 :]])
            margin = logits[position, right] - others.max()
            assert found.margins[row, position].item() == pytest.approx(margin.item(), abs=1e-5)
            assert bool(found.right[row, position]) == bool(logits[position].argmax() == right)


def _solver(model: str) -> Sequential | None:
    return Sequential() if model == "t2mlr" else None


@pytest.mark.parametrize("model", ["rlt-1", "t2mlr"])
def test_the_norm_is_that_of_the_carried_state(model: str) -> None:
    net = build_model(tiny_recipe(model)).eval()
    examples = Examples(get_task("parity"), "test", (9,), 3, 1, True, solver=_solver(model))
    found = measure_positions(net, examples, 9)
    assert "carried" in state_of(net) and "not" not in state_of(net)
    (batch,) = examples.of_length(9)
    ids, cache = batch["input_ids"], net.new_cache()
    for position in range(ids.shape[1]):  # token by token, as it decodes
        with torch.no_grad():
            cache = next(
                value
                for name, value in net(ids[:, position : position + 1], use_cache=True, past_key_values=cache).items()
                if name in ("cache", "past_key_values")
            )
        norms = cache.state.register.norm(dim=-1)
        assert torch.allclose(found.norms[:, position], norms, atol=1e-5)


def test_a_cut_is_what_a_model_with_that_window_computes_and_does_not_last() -> None:
    net = build_model(tiny_recipe("rlt-1")).eval()
    ids = torch.randint(2, (2, 20))
    with torch.no_grad():
        whole = net(ids, use_cache=False).logits
        for part, settings in attention_cuts(net, 5).items():
            with configured(net, settings):
                cut = net(ids, use_cache=False).logits
            assert torch.allclose(cut[:, :5], whole[:, :5], atol=1e-6), part
            assert not torch.allclose(cut[:, 5:], whole[:, 5:], atol=1e-6), part
        assert torch.equal(net(ids, use_cache=False).logits, whole)
    assert set(attention_cuts(net, 5)) == {"encoder", "memory", "encoder and memory"}
    assert attention_cuts(build_model(tiny_recipe("transformer")), 5) == {}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an RLT, whose weights are made to answer nothing well, and of a Transformer."""
    folder = tmp_path_factory.mktemp("runs")
    for model in ("rlt-1", "transformer"):
        run(tiny_recipe(model, task={"prefix_supervision": True}), folder / model / "seed-5")
    return folder


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["stability", *map(str, words)])
    return result.exit_code, result.output


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the command writes, and what it prints."""
    output = tmp_path_factory.mktemp("report")
    (output / "figures").mkdir()
    (output / "figures" / "other_norm.png").write_text("of an earlier report")
    code, text = command(runs, "-o", output, "--examples", 6)
    assert code == 0, text
    return output, text


def test_the_command_on_real_runs(report: tuple[Path, str]) -> None:
    output, text = report
    rows = {row["model"]: row for row in rows_of(output / "stability.csv")}
    assert set(rows) == {"rlt-1", "transformer"} and "parity/rlt-1/seed-5" in text
    places = rows_of(output / "stability_by_position.csv")
    for name, row in rows.items():
        assert (row["length"], row["num_examples"], row["last_position"], row["trained_position"]) == (
            "21",
            "6",
            "21",
            "40",
        )
        assert row["verdict"] in text and row["explanation"]
        own = [place for place in places if place["model"] == name]
        assert [int(place["position"]) for place in own] == list(range(1, 22))
        shares = [float(place["right_percent"]) for place in own]
        assert float(row["right_percent"]) == pytest.approx(sum(shares) / len(shares), abs=0.01)
        assert float(own[-1]["without_error_percent"]) == float(row["without_error_percent"])
    page = (output / "stability.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']*""", page.replace("xlink:href", "href"))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and page.count("<svg") == 3
    names = {f"parity_{kind}.{form}" for kind in ("accuracy", "margin", "norm") for form in ("png", "svg")}
    assert {path.name for path in (output / "figures").iterdir()} == names


def test_what_it_says_is_what_the_run_was_tested_with(runs: Path) -> None:
    """At the end of the sequences it has the same answers as the run's own test."""
    from crosscurrent.experiments.run_folder import RunFolder

    for one in measure_runs(runs, length=9):
        tested = RunFolder(one.run.path).result()["test"]["9"]["final"]
        assert one.positions.by_position[-1].right == pytest.approx(tested)


def test_one_run_and_a_length_that_it_was_not_tested_at(runs: Path) -> None:
    (one,) = measure_runs(runs / "rlt-1" / "seed-5", length=50, num_examples=3)
    assert (one.run.model, one.length, one.findings.num_examples, one.trained_length) == ("rlt-1", 50, 3, 40)
    assert one.findings.hazard_beyond.chances <= 3 * 10


def test_the_attention_of_a_model_that_learned_is_cut(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosscurrent.experiments.stability.runs.LEARNED", 0.0)
    by_model: dict[str, Measured] = {one.run.model: one for one in measure_runs(runs, length=60, num_examples=2)}
    assert set(by_model["rlt-1"].findings.cuts) == {"encoder", "memory", "encoder and memory"}
    assert by_model["transformer"].findings.cuts == {}


def test_the_same_runs_give_the_same_files(runs: Path, report: tuple[Path, str], tmp_path: Path) -> None:
    for written in write_stability(measure_runs(runs, num_examples=6), tmp_path):
        assert written.read_bytes() == (report[0] / written.relative_to(tmp_path)).read_bytes(), written.name


def test_bad_input_is_named_and_leaves_nothing_behind(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "file").write_text("")
    copy = shutil.copytree(runs / "rlt-1" / "seed-5", tmp_path / "copy")
    shutil.rmtree(copy / "model")
    begun = shutil.copytree(runs / "rlt-1" / "seed-5", tmp_path / "begun")
    (begun / "result.json").unlink()
    cases = {
        (tmp_path / "absent", "-o", out): "not a folder",
        (begun, "-o", out): "none of the 1 runs",
        (copy, "-o", out): "no weights",
        (runs, "-o", out, "--length", 5): "length=5 is not allowed for the test split of parity",
        (runs, "-o", tmp_path / "file"): "is a file",
        (runs, "-o", tmp_path / "file" / "below"): "is a file",
    }
    for words, message in cases.items():
        code, text = command(*words)
        assert code == 1 and message in text, (words, text)
    assert command(runs, "-o", out, "--examples", 0)[0] == 2
    assert not out.exists()


def test_lengths_that_grew_to_their_end_did_not_stop_short(tmp_path: Path) -> None:
    """Also where there are training lengths beyond that end."""
    growth = {"first": 3, "last": 6, "factor": 1.5, "loss_below": 100.0, "min_steps": 1}
    task = {"prefix_supervision": True, "train_lengths": [3, 4, 5, 6, 40]}
    run(tiny_recipe(task=task, curriculum={"max_length": {"growth": growth}}), tmp_path / "grown")
    growth["loss_below"] = 1e-9
    run(tiny_recipe(task=task, curriculum={"max_length": {"growth": growth}}), tmp_path / "stuck")
    stopped = [
        measure_runs(tmp_path / name, length=9, num_examples=2)[0].findings.stopped_at for name in ("grown", "stuck")
    ]
    assert stopped == [None, 3]


SCATTER = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "state_scatter.py"))


def test_mean_states_by_hand() -> None:
    states = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 5.0]])
    means = SCATTER["means_by_answer"](states, torch.tensor([2, 2, 0]), 4)
    assert means[[0, 2]].tolist() == [[5.0, 5.0], [2.0, 2.0]] and bool(means[[1, 3]].isnan().all())


def test_scatter_of_states(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figure of the first positions, reckoned sequence by sequence."""
    SCATTER["main"]([str(runs / "rlt-1" / "seed-5"), "--length", "21", "--examples", "40"])
    shown = re.search(r"positions    0-15    scatter ([0-9.]+) .* (\d+) states of", capsys.readouterr().out)
    assert shown is not None
    net = AutoModelForCausalLM.from_pretrained(runs / "rlt-1" / "seed-5" / "model").eval()
    states: dict[int, list[tuple[int, Tensor]]] = {}  # by answer: position and state
    for index in range(40):
        example = get_task("parity").example("test", 21, index, 20260916, True)
        ids, labels = torch.tensor(example.tokens), torch.tensor(example.targets)
        seen: list[Tensor] = []
        handle = net.model.norm.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0][0]))
        with torch.no_grad():
            said = net(ids[None], use_cache=False).logits[0].argmax(-1)
        handle.remove()
        first = int((labels != IGNORED).int().argmax())
        for position in range(first, len(labels)):
            if said[position] != labels[position]:
                break
            state = seen[0][position]
            states.setdefault(int(labels[position]), []).append(
                (position - first, state / state.square().mean().sqrt())
            )
    away = [
        (state - torch.stack([other for _, other in of_answer]).mean(0)).square().sum()
        for of_answer in states.values()
        for position, state in of_answer
        if position < 16
    ]
    assert int(shown[2]) == len(away) and float(shown[1]) == pytest.approx(
        float(torch.stack(away).mean().sqrt()), abs=0.006
    )


def test_what_has_no_scatter_is_said(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        (str(tmp_path),): "not the folder of a finished run",
        (str(runs / "transformer" / "seed-5"),): "no RLT-1",
        (str(runs / "rlt-1" / "seed-5"), "--length", "-3"): "length=-3",
    }
    for words, message in cases.items():
        with pytest.raises(SystemExit) as ended:
            SCATTER["main"](list(words))
        assert ended.value.code == 1 and message in capsys.readouterr().err

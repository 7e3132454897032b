"""Interventions on the carried state: against `generate`, against weights that cannot read a state, and as a command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.evaluation.answering import AnsweringSettings, answer_problems, read_answers
from crosscurrent.evaluation.interventions import Intervention, Moment, Off, Other, Random, Reset, decode
from crosscurrent.experiments import ablation
from crosscurrent.models.base import load_base, load_tokenizer
from crosscurrent.tasks.reasoning import get_reasoning_task
from tests.subjects import make_base, make_rlt, make_t2mlr, token_ids
from tests.tiny_base import character_tokenizer, save_opened_retrofit, save_tiny_base

NEW = 4
LENGTHS = (4, 6, 3, 6)
ALL = [Intervention(), Off(), Reset(1), Reset(3), Other(), Random(seed=4)]

pytestmark = pytest.mark.usefixtures("exact_arithmetic")
SUBJECTS: dict[str, Callable[[], Any]] = {
    "t2mlr": lambda: make_t2mlr("llama"),
    "t2mlr_answers": lambda: make_t2mlr("mistral", prompt_recurrence=False),
    "rlt2": lambda: make_rlt(feedback_interval=2, feedback_scale=3.0, tie_word_embeddings=False),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Any:
    return SUBJECTS[request.param]()


def prompts() -> list[list[int]]:
    return [ids[:length].tolist() for ids, length in zip(token_ids(4, 6), LENGTHS, strict=True)]


def answers(model: Any, intervention: Intervention, rows: Any = None, **settings: Any) -> list[list[int]]:
    """Of the chosen rows, each with the row after it, of all, for a partner."""
    given, rows = prompts(), range(len(LENGTHS)) if rows is None else rows
    return decode(
        model,
        [given[row] for row in rows],
        [f"problem {row}" for row in rows],
        intervention,
        partners=[given[(row + 1) % len(given)] for row in rows],
        **{"max_new_tokens": NEW, **settings},
    )


def generated(model: Any, **settings: Any) -> list[list[int]]:
    """What `generate` writes after each prompt, one by one."""
    ids = [torch.tensor([prompt]) for prompt in prompts()]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return [model.generate(one, **options)[0, one.shape[1] :].tolist() for one in ids]


def logits_of(model: Any, monkeypatch: pytest.MonkeyPatch, intervention: Intervention) -> Tensor:
    """[N, V] the logits of the first row's prompt and answer, token by token."""
    seen: list[Tensor] = []
    forward = type(model).forward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        seen.append(output.logits[:, -1])
        return output

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", recorded)
        answers(model, intervention, [1])
    return torch.cat([logits[:1] for logits in seen])


def test_unchanged_is_generate(subject: Any) -> None:
    expected = generated(subject, solver=cc.Sequential())
    assert answers(subject, Intervention()) == expected
    assert answers(subject, Reset(max(LENGTHS) + NEW)) == expected
    assert len({tuple(answer) for answer in expected}) == len(expected)


@pytest.mark.parametrize("intervention", ALL, ids=lambda one: one.name)
def test_rows_do_not_depend_on_their_batch(subject: Any, intervention: Intervention) -> None:
    together = answers(subject, intervention)
    assert together == [answers(subject, intervention, [row])[0] for row in range(len(LENGTHS))]
    assert together[1:3] == answers(subject, intervention, [1, 2])


@pytest.mark.parametrize("intervention", ALL[1:], ids=lambda one: one.name)
def test_each_intervention_changes_answers_and_leaves_the_model_as_it_was(
    subject: Any, intervention: Intervention
) -> None:
    before = answers(subject, Intervention())
    weights = {name: tensor.clone() for name, tensor in subject.state_dict().items()}
    subject.train()
    random_state = torch.get_rng_state()
    assert answers(subject, intervention) != before
    assert subject.training and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in subject.state_dict().items())
    subject.eval()
    assert answers(subject, Intervention()) == before


def test_off_is_a_model_none_of_whose_tokens_is_recurrent() -> None:
    assert answers(make_t2mlr("llama"), Off()) == generated(make_base("llama"))
    model, (prompt, *_) = make_rlt(), prompts()
    (found, *_), ids = answers(model, Off()), list(prompt)
    for _ in range(NEW):
        ids.append(int(model(torch.tensor([ids]), recurrent_mask=torch.zeros(1, len(ids))).logits[0, -1].argmax()))
    assert found == ids[len(prompt) :]


def test_reset_at_each_token_is_a_fusion_that_cannot_see_the_state() -> None:
    model, blind = make_t2mlr("llama"), make_t2mlr("llama")
    with torch.no_grad():
        blind.fusion.recurrent_projection.weight.zero_()
        blind.fusion.current_gate.from_state.weight.zero_()
    assert answers(model, Reset(1)) == generated(blind)
    assert answers(model, Reset(1)) != answers(model, Off())  # the gate on the stream acts
    with torch.no_grad():
        model.fusion.current_scale.zero_()
    assert answers(model, Reset(1)) == answers(model, Off())


def test_reset_forgets_at_its_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_t2mlr("llama")
    intact, reset = (logits_of(model, monkeypatch, one) for one in (Intervention(), Reset(3)))
    assert torch.equal(intact[:3], reset[:3])  # tokens 0 to 2: number 0 reads nothing anyway
    assert not torch.allclose(intact[3], reset[3])


def test_a_partner_that_is_the_problem_itself_changes_nothing(subject: Any) -> None:
    given, ids = prompts(), ["a", "b", "c", "d"]
    found = decode(subject, given, ids, Other(), partners=given, max_new_tokens=NEW)
    assert found == answers(subject, Intervention())


def test_the_partners_state_is_that_of_its_unchanged_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token's answer under a state that was taken out of the partner's own cache by hand."""
    model, given = make_t2mlr("llama", prompt_recurrence=False), prompts()
    (found,) = answers(model, Other(), [0], max_new_tokens=2)
    states = []
    for row in (0, 1):
        ids = torch.tensor([given[row]])
        output = model(ids, recurrent_mask=torch.zeros_like(ids), use_cache=True)
        states.append((output, getattr(output, "cache", None) or output.past_key_values))
    (own, cache), (_, other) = states
    first = own.logits[0, -1].argmax()
    cache.state = type(cache.state)(other.state.register, cache.state.num_tokens, cache.state.segment)
    second = model(first.view(1, 1), past_key_values=cache).logits[0, -1].argmax()
    assert found == [int(first), int(second)]


def test_random_states_are_seeded_and_of_the_states_size(subject: Any) -> None:
    assert answers(subject, Random(1)) == answers(subject, Random(1))
    assert answers(subject, Random(1)) != answers(subject, Random(2))
    registers = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    moment = Moment(registers, torch.zeros_like(registers), torch.tensor([2, 2]), ["a", "b"])
    drawn = Random().read(moment)
    assert torch.allclose(drawn.norm(dim=-1), registers.norm(dim=-1))
    assert not torch.allclose(drawn[0], registers[0])


def test_answers_end_with_an_end_token() -> None:
    model = make_t2mlr("llama")
    eos = answers(model, Intervention())[0][2]
    for intervention in (Intervention(), Other(), Random()):
        whole, cut = answers(model, intervention), answers(model, intervention, eos_ids=[eos])
        alone = [answers(model, intervention, [row], eos_ids=[eos])[0] for row in range(len(LENGTHS))]
        assert cut == alone  # a partner that has ended is read as it was at its end
        if not intervention.reads_partners:
            assert cut == [row[: row.index(eos) + 1] if eos in row else row for row in whole]


def test_wrong_inputs_are_named() -> None:
    model = make_t2mlr("llama")
    with pytest.raises(ValueError, match="no recurrence"):
        decode(make_base("llama"), [[1]], ["a"], Off(), max_new_tokens=1)
    with pytest.raises(ValueError, match="feedback_interval=None"):
        decode(make_rlt(feedback_interval=None), [[1]], ["a"], Off(), max_new_tokens=1)
    with pytest.raises(ValueError, match="partner"):
        decode(model, [[1]], ["a"], Other(), max_new_tokens=1)
    with pytest.raises(ValueError, match="empty"):
        decode(model, [[1], []], ["a", "b"], Off(), max_new_tokens=1)
    with pytest.raises(ValueError, match="every=0"):
        Reset(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers alone are recurrent: its prompts take one call."""
    folder = tmp_path_factory.mktemp("models")
    opened = save_opened_retrofit(save_tiny_base(folder / "base"), folder / "opened")
    model = cc.T2MLRForCausalLM.from_pretrained(opened)
    model.config.prompt_recurrence = False
    model.save_pretrained(opened)
    tokenizer = character_tokenizer()
    tokenizer.eos_token = "~"
    for each in (folder / "base", opened):
        tokenizer.save_pretrained(each)
    return opened


def ablate(model: Path, output: Path, *more: object) -> Any:
    """On three problems."""
    given = ["ablate", model, "--task", "variable_assignment:depth=1", "--limit", 3, "--output", output, *more]
    return CliRunner().invoke(app, [str(word) for word in given])


def outputs(folder: Path, condition: str) -> list[str]:
    return [record.output for record in read_answers(folder / f"{condition}.jsonl").records]


def test_command_compares_conditions_and_goes_on(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--reset", "1,1000", "--batch-size", 2)
    result = ablate(saved, tmp_path / "scores", *asked)
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "scores" / "ablation.json").read_text())
    conditions = facts["conditions"]
    assert list(conditions) == ["intact", "off", "reset-1", "reset-1000", "other", "random"]
    assert all(any(line.startswith(name) for line in result.stdout.splitlines()) for name in conditions)
    assert conditions["reset-1000"]["changed_rate"] == 0
    assert conditions["reset-1000"]["compared_to_intact"][0]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert all(conditions[name]["changed_rate"] > 0 for name in ("off", "reset-1", "other", "random"))
    assert {"accuracy.png", "accuracy.svg"} <= {file.name for file in (tmp_path / "scores").iterdir()}

    assert ablate(saved, tmp_path / "others", "--conditions", "other", "--batch-size", 3).exit_code == 0
    assert outputs(tmp_path / "others", "other") == outputs(
        tmp_path / "scores", "other"
    )  # partners are not of the batch

    lines = (tmp_path / "scores" / "other.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "scores" / "other.jsonl").write_text("".join(lines[:-1]) + lines[-1][:9])  # as a kill leaves it
    continued: list[Any] = []

    def counted(*given: Any, **more: Any) -> Any:
        continued.append(given)
        return decode(*given, **more)

    monkeypatch.setattr(ablation, "decode", counted)
    before = outputs(tmp_path / "others", "other")
    assert ablate(saved, tmp_path / "scores", *asked).exit_code == 0
    ((_, _, ids, intervention),) = continued
    assert ids == ["test-0-2"] and intervention == Other()
    assert outputs(tmp_path / "scores", "other") == before

    result = ablate(saved, tmp_path / "scores", *asked, "--seed", 5)
    assert result.exit_code == 1 and "intervention.seed: 0 -> 5" in result.stderr and len(continued) == 1


def test_unchanged_answers_are_those_of_evaluation(saved: Path, tmp_path: Path) -> None:
    model, tokenizer = load_base(str(saved)), load_tokenizer(str(saved))
    task = get_reasoning_task("variable_assignment", depth=1)
    problems = task.problems("test", count=2)
    for recurrence in (True, False):
        settings = AnsweringSettings(prompt_recurrence=recurrence, solver="exact")
        folder = tmp_path / str(recurrence)
        ablation.run_ablation(model, tokenizer, task, problems, [Intervention()], folder, settings)
        expected = answer_problems(model, tokenizer, task, problems, settings)
        assert outputs(folder, "intact") == [record.output for record in expected]


def test_what_cannot_be_ablated_is_said_at_once(saved: Path, tmp_path: Path) -> None:
    output = tmp_path / "scores"
    for more, code, words in (
        (("--reset", "4,0"), 2, "'0' is not a number"),
        (("--conditions", "off", "--reset", "4"), 2, "has no effect"),
        (("--conditions", "off", "--seed", "4"), 2, "has no effect"),
        (("--conditions", "othr"), 1, "Did you mean 'other'"),
        (("--task", "variable_assignment:deep=2"), 1, "no option 'deep'"),
        (("--limit", "1"), 1, "at least two"),
    ):
        result = ablate(saved, output, *more)
        assert result.exit_code == code, result.output
        assert words in " ".join(result.stderr.split()), result.stderr
    result = ablate(saved, saved)
    assert result.exit_code == 1 and "holds something else" in result.stderr
    result = ablate(saved.parent / "base", output)
    assert result.exit_code == 1 and "no recurrence" in result.stderr
    assert not output.exists()


def test_closed_gates_are_warned_of(saved: Path, tmp_path: Path) -> None:
    tokenizer, task = load_tokenizer(str(saved)), get_reasoning_task("variable_assignment", depth=1)
    model = cc.retrofit(load_base(str(saved.parent / "base")), 1, 3)
    with pytest.warns(UserWarning, match="gate on the state is closed"):
        facts = ablation.run_ablation(
            model, tokenizer, task, task.problems("test", count=1), ablation.interventions_of(["off"]), tmp_path
        )
    assert facts["conditions"]["off"]["changed_rate"] == 0

"""The command line: what it writes where, its exit codes, and that a failed command leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli import demo as demo_command
from crosscurrent.cli.generate import SolverName
from crosscurrent.cli.main import app
from crosscurrent.models.t2mlr.configuration_t2mlr import DEFAULT_SOLVER
from crosscurrent.recurrence import SOLVERS
from tests.tiny_base import save_opened_retrofit, save_tiny_base

PROMPT = "three plus four is"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def opened(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opened_retrofit(base, tmp_path_factory.mktemp("models") / "opened", cc.Jacobi(1, 1))


def run(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def retrofit(base: Path, output: Path, *more: object) -> Any:
    return run("retrofit", base, output, "--layer-start", 1, "--layer-end", 3, *more)


def assert_one_line_of_error(result: Any, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if "%|" not in line]  # progress bars may come before it
    assert line.startswith("error: ") and "Traceback" not in line
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("command", ["demo", "retrofit", "generate", "info", "inspect", "gap"])
def test_help_teaches_by_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: crosscurrent {command}" in result.stdout
    assert command in run("--help").stdout


def test_help_shows_defaults() -> None:
    text = run("retrofit", "--help").stdout
    assert f"[default: ({DEFAULT_SOLVER.iterations});" in text and "[default: (an implicit" in text
    assert "demo-output" in run("demo", "--help").stdout


def test_every_solver_can_be_chosen() -> None:
    assert {name.value for name in SolverName} == set(SOLVERS)


@pytest.mark.parametrize("arguments", [("nothing",), ("retrofit", "a", "b"), ("demo", "everything"), ("info",)])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Usage" in result.stderr


def test_version() -> None:
    assert run("--version").stdout == f"{cc.__version__}\n"


def test_retrofit_writes_a_model_equal_to_its_base(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "model"
    settings = ["--feedback-interval", 4, "--iterations", 8, "--backward-iterations", 3]
    result = retrofit(base, output, *settings)
    assert result.exit_code == 0, result.output
    assert "largest logit difference to the base on a sample: 0.0" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(output)
    assert isinstance(model, cc.T2MLRForCausalLM)
    card = (output / "README.md").read_text()
    assert "crosscurrent retrofit base model --layer-start 1 --layer-end 3 --feedback-interval 4 --iterations 8" in card
    assert str(tmp_path) not in card and str(base) not in card
    assert (model.config.layer_start, model.config.layer_end, model.config.feedback_interval) == (1, 3, 4)
    assert model.config.solver["iterations"] == 8 and model.config.solver["backward_iterations"] == 3
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert torch.equal(model(ids).logits, AutoModelForCausalLM.from_pretrained(base)(ids).logits)
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_retrofit_overwrites_models_only_when_told(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert retrofit(base, output).exit_code == 0
    (output / "mark").write_text("of the first")
    assert_one_line_of_error(retrofit(base, output), "not empty")
    assert (output / "mark").exists()
    assert retrofit(base, output, "--overwrite").exit_code == 0
    assert not (output / "mark").exists() and (output / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_retrofit_never_overwrites_anything_but_a_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter").write_text("dear")
    assert_one_line_of_error(retrofit(base, tmp_path / "letters", "--overwrite"), "letters")
    assert_one_line_of_error(retrofit(base, tmp_path / "letters" / "letter", "--overwrite"), "is a file")
    assert (tmp_path / "letters" / "letter").read_text() == "dear"


@pytest.mark.parametrize("existing", [False, True])
def test_failed_retrofit_leaves_things_as_they_were(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    output = tmp_path / "model"
    if existing:
        retrofit(base, output)

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", disk_full)  # after the weights were written
    assert_one_line_of_error(retrofit(base, output, "--overwrite"), "No space left")
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_input_is_one_line_on_stderr(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    result = run("retrofit", base, output, "--layer-start", 3, "--layer-end", 9)
    assert_one_line_of_error(result, "layer_end=9", "<= 4")
    assert retrofit(base, output, "--feedback-interval", 0).exit_code == 2  # before the base is loaded
    assert run("generate", base, "Hi", "--sample", "--top-p", 2).exit_code == 2
    assert_one_line_of_error(retrofit(base, output, "--backward-iterations", 99), "backward_iterations=99")
    assert not output.exists()
    for command in ("info", "generate"):
        more = [PROMPT] if command == "generate" else []
        assert_one_line_of_error(run(command, tmp_path / "missing", *more), "missing")


def test_damaged_checkpoint_is_one_line_on_stderr(base: Path, tmp_path: Path) -> None:
    save_tiny_base(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_one_line_of_error(run("info", tmp_path), tmp_path.name)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("demo.tracking", "report", "report.page", "report.figures"):
        monkeypatch.delitem(sys.modules, f"crosscurrent.experiments.{name}", raising=False)
    assert_one_line_of_error(run("demo", "tracking", "--output", tmp_path), "matplotlib", "crosscurrent[train,plot]")


def test_demo_runs_the_parts_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from crosscurrent.experiments.demo import retrofit as retrofit_demo
    from crosscurrent.experiments.demo import tracking as tracking_demo

    ran = []
    monkeypatch.setattr(tracking_demo, "run_tracking", lambda output, seed: ran.append(("tracking", seed)))
    monkeypatch.setattr(tracking_demo, "report", lambda collection: "the table")
    monkeypatch.setattr(retrofit_demo, "run_retrofit", lambda output, seed: ran.append(("retrofit", seed)))
    assert "the table" in run("demo", "tracking", "--output", tmp_path).stdout
    assert run("demo", demo_command.Part.retrofit, "--seed", 2).exit_code == 0
    assert run("demo").exit_code == 0
    assert ran == [("tracking", 42), ("retrofit", 2), ("tracking", 42), ("retrofit", 42)]


def test_info_of_a_retrofitted_model(opened: Path) -> None:
    facts = json.loads(run("info", opened, "--json").stdout)
    model: Any = AutoModelForCausalLM.from_pretrained(opened)
    assert facts["model_type"] == "crosscurrent_t2mlr" and facts["base_model_type"] == "llama"
    assert (facts["layer_start"], facts["layer_end"], facts["feedback_interval"]) == (1, 3, 1)
    assert facts["solver"]["name"] == "jacobi" and facts["solver"]["iterations"] == 1
    assert facts["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["num_recurrent_parameters"] == 5 * 16**2 + 2 * 16 + 2 + 16
    assert facts["gate_opening_recurrent"] == pytest.approx(model.fusion.recurrent_scale.tanh().item())
    assert facts["gate_opening_current"] == pytest.approx(model.fusion.current_scale.tanh().item())
    assert facts["dtype"] == "float32" and facts["vocab_size"] == 102
    text = run("info", opened).stdout
    assert "layer start" in text and f"{facts['num_parameters']:,}" in text


def test_info_of_an_rlt_and_of_a_plain_model(base: Path, tmp_path: Path) -> None:
    config = cc.RLTConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_encoder_layers=3, num_decoder_layers=2, sliding_window=5
    )
    cc.RLTForCausalLM(config).save_pretrained(tmp_path)
    facts = json.loads(run("info", tmp_path, "--json").stdout)
    expected: dict[str, Any] = {"num_encoder_layers": 3, "num_decoder_layers": 2, "sliding_window": 5}
    expected |= {"num_memory_groups": 1}
    expected |= {"feedback_interval": 1, "feedback_scale": 0.1, "num_layers": 5, "vocab_size": 11}
    expected |= {"num_recurrent_parameters": 8 * 8 + (2 * 8 * 8 + 8) + 8 + 8}
    assert expected.items() <= facts.items()
    plain = json.loads(run("info", base, "--json").stdout)
    assert plain["model_type"] == "llama" and plain["num_recurrent_parameters"] == 0 and "solver" not in plain


def continued(folder: Path, text: str, **settings: Any) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=12, do_sample=False, **settings)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_generate_prints_the_generated_text_only(opened: Path) -> None:
    plain = run("generate", opened, PROMPT, "--no-chat", "--max-new-tokens", 12)
    assert plain.exit_code == 0 and plain.stdout == continued(opened, PROMPT) + "\n"
    piped = run("generate", opened, "--no-chat", "--max-new-tokens", 12, stdin=f"{PROMPT}\n")
    assert piped.stdout == plain.stdout
    chat = run("generate", opened, PROMPT, "--max-new-tokens", 12)
    assert chat.stdout == continued(opened, f"Q: {PROMPT}\nA: ") + "\n" != plain.stdout


def test_generate_passes_the_recurrence_on(opened: Path) -> None:
    options: dict[tuple[str, ...], dict[str, Any]] = {
        ("--solver", "sequential"): {"solver": cc.Sequential()},
        ("--solver", "jacobi"): {"solver": cc.Jacobi(1, 1)},  # as the model is configured
        ("--no-prompt-recurrence",): {"prompt_recurrence": False},
    }
    texts = set()
    for option, settings in options.items():
        text = run("generate", opened, PROMPT, "--no-chat", "--max-new-tokens", 12, *option).stdout
        assert text == continued(opened, PROMPT, **settings) + "\n", option
        texts.add(text)
    assert len(texts) == len(options)


def test_generate_refuses_recurrence_settings_for_a_plain_model(base: Path) -> None:
    assert_one_line_of_error(run("generate", base, PROMPT, "--solver", "sequential"), "no recurrence")


def test_sampling_follows_its_seed(opened: Path) -> None:
    def sampled(seed: int, *more: object) -> str:
        return str(run("generate", opened, PROMPT, "--sample", "--seed", seed, "--max-new-tokens", 12, *more).stdout)

    assert sampled(1) == sampled(1) != sampled(2)
    assert sampled(1, "--temperature", 1e-4) == sampled(2, "--top-p", 1e-6)  # both leave the likeliest only
    assert_one_line_of_error(run("generate", opened, PROMPT, "--sample", "--temperature", 0), "temperature")


def test_settings_without_effect_and_empty_prompts_are_refused(opened: Path) -> None:
    assert run("generate", opened, PROMPT, "--top-p", 0.5).exit_code == 2
    assert_one_line_of_error(run("generate", opened, stdin=""), "prompt is empty")


def test_in_a_pipe(opened: Path) -> None:
    """As a script sees it: the result alone on stdout, no escape sequences anywhere, nothing from transformers."""
    command = [sys.executable, "-c", "from crosscurrent.cli.main import app; app()", "info", str(opened), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(finished.stdout)["model_type"] == "crosscurrent_t2mlr"
    assert finished.stderr == ""


@pytest.mark.once
def test_smollm2_from_start_to_end(tmp_path: Path) -> None:
    """The packaged model is read from GGUF and saved as any other."""
    made = run("retrofit", "smollm2-135m", tmp_path / "model", "--layer-start", 12, "--layer-end", 18)
    assert made.exit_code == 0, made.output
    assert "largest logit difference to the base on a sample: 0.0" in made.stdout
    said = run("generate", tmp_path / "model", "The capital of France is", "--no-chat", "--max-new-tokens", 4)
    assert said.exit_code == 0 and "Paris" in said.stdout

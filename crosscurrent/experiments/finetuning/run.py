"""One run of fine-tuning: a pretrained model, perhaps retrofitted, is trained on problems, saved, and tested."""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments, set_seed

from crosscurrent.evaluation.answering import Session, score_answers
from crosscurrent.experiments.finetuning.examples import ProblemsOfRun, describe
from crosscurrent.experiments.finetuning.recipe import FinetuneRecipe, LoraRecipe
from crosscurrent.experiments.processes import from_first, rank
from crosscurrent.experiments.run_folder import MUST_AGREE_TO_COMPARE, RunFolder, read_json
from crosscurrent.experiments.running import run_in_folder, training_arguments
from crosscurrent.experiments.saving import save_model
from crosscurrent.experiments.settings import read_yaml, validated
from crosscurrent.files import write_whole
from crosscurrent.models.base import load_base, load_tokenizer
from crosscurrent.models.generation import RecurrentCausalLM
from crosscurrent.models.t2mlr import T2MLRForCausalLM, retrofit
from crosscurrent.recurrence import solver_from_dict
from crosscurrent.training.adapters import freeze_base, lora_config
from crosscurrent.training.checkpoints import checkpoint_folder, complete_steps, keep_only, one_kind_of_write_error
from crosscurrent.training.optimization import fusion_optimizer
from crosscurrent.training.signals import StopOnSignal
from crosscurrent.training.text_trainer import TextTrainer
from crosscurrent.training.trainer import Progress, Recorder

FUSION_FACTOR = 100.0  # the authors' of T2MLR, on GSM8K


class FinetuneRunFolder(RunFolder):
    """The files of one run of fine-tuning.

    As of a run on a task, with answers.jsonl, a line for each test problem, in place of predictions, and adapter/, if the
    base was trained by one (`model` holds it merged).
    """

    must_agree_to_go_on = (*MUST_AGREE_TO_COMPARE, "problems")

    def __init__(self, path: Path, problems: ProblemsOfRun | None = None):
        super().__init__(path)
        self.problems = problems
        self.answers_file = path / "answers.jsonl"
        self.adapter = path / "adapter"

    def versions_now(self) -> dict[str, Any]:
        """With what tells one set of problems from another."""
        return super().versions_now() | ({} if self.problems is None else {"problems": self.problems.fingerprint})

    @property
    def parts_of_finished(self) -> tuple[Path, ...]:
        return (self.metrics.path, self.answers_file)  # the model may have been moved to where it is used

    def recipe(self) -> FinetuneRecipe:
        return validated(FinetuneRecipe, read_yaml(self.recipe_file), str(self.recipe_file))

    def result(self) -> dict[str, Any]:
        return read_json(self.result_file, "steps", "validation_loss", "test", "num_parameters", "seconds_per_step")


def run_finetune(recipe: FinetuneRecipe, path: str | Path, name: str = "") -> dict[str, Any] | None:
    """Do a run of fine-tuning, or what is missing of it: also of the answers, if the process was stopped among them.

    Args:
        recipe: what to do.
        path: its folder.
        name: shown beside the progress bars.

    Returns:
        What `result.json` holds; None in all processes but the first, if there are several.

    Raises:
        ValueError: the folder is another run's; the base does not fit (range, chat template, context); the data do not; a
            loss is not finite.
        TerminatedError: a SIGTERM came; the checkpoint is written.
        BusyError: another process is at work on it.
        OSError: something cannot be read or written; the last checkpoint is intact.

    Example::

        result = run_finetune(load_recipe(Path("my.yaml")), Path("runs/mine"))
    """
    before = FinetuneRunFolder(Path(path))
    if before.is_done:  # its data may be gone by now
        before.check_recipe(recipe)
        return before.result() if rank() == 0 else None
    if recipe.training.method == "lora" and find_spec("peft") is None:
        raise ValueError("training.method=lora needs the package peft: pip install 'crosscurrent[finetune]'.")
    model, problems = build_finetuned(recipe)
    folder = FinetuneRunFolder(Path(path), problems)
    assert problems.train and problems.validation  # raises if they cannot be trained on
    tokens, test = problems.tokens, problems.problems("test")
    Session(model, tokens.tokenizer, tokens.task, test, recipe.answering, name)  # raises if they cannot be asked
    run = _Run(recipe, folder, problems, model, _arguments(recipe, folder), name or folder.path.name)
    return run_in_folder(folder, recipe, train=run.train, finish=run.finish)


def build_finetuned(recipe: FinetuneRecipe) -> tuple[PreTrainedModel, ProblemsOfRun]:
    """The model as it is before training, in float32, and the problems for it.

    Raises:
        ValueError: the base cannot be loaded or does not fit.
    """
    asked = recipe.problems
    if asked.data is not None:  # a folder that is not there should show before a model is loaded
        asked.task.problems("test", asked.data_path, asked.num_test)
    if rank() == 0:
        tqdm.write(f"loading {recipe.base.name}", file=sys.stderr)
    base = load_base(recipe.base.name, dtype=torch.float32)
    if isinstance(base, RecurrentCausalLM):
        raise ValueError(
            f"{recipe.base.name} is a {type(base).__name__}, which is recurrent already: give the model that it was made "
            "from."
        )
    problems = ProblemsOfRun(recipe, load_tokenizer(recipe.base.name), base)
    set_seed(recipe.seed)
    return _with_recurrence(base, recipe), problems


def _with_recurrence(base: PreTrainedModel, recipe: FinetuneRecipe) -> PreTrainedModel:
    asked = recipe.base
    if asked.layer_start is None or asked.layer_end is None:
        return base
    return retrofit(
        base,
        asked.layer_start,
        asked.layer_end,
        solver=None if asked.solver is None else solver_from_dict(asked.solver),
        feedback_interval=asked.feedback_interval,
        prompt_recurrence=recipe.part_that_recurs == "all",
        detach_residual=asked.detach_residual,
    )


def trainable(model: PreTrainedModel, recipe: FinetuneRecipe) -> Any:
    """The model with what is to be trained set, wrapped in an adapter if the recipe asks for one."""
    if recipe.training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()  # else nothing reaches an adapter behind a frozen embedding
    if recipe.training.method == "fusion":
        assert isinstance(model, T2MLRForCausalLM)
        freeze_base(model)
    if recipe.training.method != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    settings = (recipe.training.lora or LoraRecipe()).model_dump()
    if isinstance(model, T2MLRForCausalLM):
        config = lora_config(model, **settings)
    else:
        config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return get_peft_model(model, config)


def _arguments(recipe: FinetuneRecipe, folder: RunFolder) -> TrainingArguments:
    training = recipe.training
    return training_arguments(
        training,
        folder,
        recipe.seed,
        save_steps=training.save_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
    )


@dataclass
class _Run:
    """A run in its folder."""

    recipe: FinetuneRecipe
    folder: FinetuneRunFolder
    problems: ProblemsOfRun
    model: PreTrainedModel
    arguments: TrainingArguments
    name: str

    def train(self) -> None:
        """Train to the end, from the last complete checkpoint that the metrics lead up to, if there is one."""
        last = self.folder.metrics.trained_until()
        done = from_first(max((step for step in complete_steps(self.folder.checkpoints) if step <= last), default=0))
        if done == self.recipe.training.max_steps and self.folder.model.exists():
            return  # it was stopped while it answered
        if rank() == 0:
            self.folder.metrics.cut_after(done)
            keep_only(self.folder.checkpoints, {done})
            if done:
                tqdm.write(f"{self.name} goes on from step {done}", file=sys.stderr)
        with Progress(self.name) as progress, StopOnSignal() as stop:
            trainer = self._trainer(done, progress, stop)
            checkpoint = checkpoint_folder(self.folder.checkpoints, done)
            trainer.train(resume_from_checkpoint=str(checkpoint) if done else None)
        stop.check(self.name)
        if rank() == 0:
            self._save(trainer.accelerator.unwrap_model(trainer.model))

    def _trainer(self, done: int, progress: Progress, stop: StopOnSignal) -> TextTrainer:
        training = self.recipe.training
        model = trainable(self.model, self.recipe)
        more: dict[str, Any] = {}
        if self.recipe.base.is_recurrent:
            rate = training.fusion_learning_rate or FUSION_FACTOR * training.learning_rate
            more["optimizer_cls_and_kwargs"] = fusion_optimizer(self.arguments, rate)
        return TextTrainer(
            model=model,
            validation=self.problems.validation,  # type: ignore[arg-type]
            validation_solver=None,
            guard=self.recipe.guard.guard(),
            args=self.arguments,
            train_dataset=self.problems.train_rows,
            data_collator=self.problems.collate,
            callbacks=[
                Recorder(self.folder.metrics, self.folder.checkpoints, lambda step: {}, lambda step: {step}),
                progress,
                stop,
            ],
            **more,
        )

    def _save(self, trained: Any) -> None:
        if self.recipe.training.method == "lora":
            with one_kind_of_write_error(str(self.folder.adapter)):
                trained.save_pretrained(self.folder.adapter)
            trained = trained.merge_and_unload()
        with one_kind_of_write_error(str(self.folder.model)):
            save_model(trained, self.problems.tokens.tokenizer, self.folder.model, overwrite=True)

    def finish(self) -> None:
        """Answer the test problems with the model as it was saved, and write the result."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder.model, dtype=torch.float32).eval()
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        test = score_answers(
            model,
            self.problems.tokens.tokenizer,
            self.problems.tokens.task,
            self.problems.problems("test"),
            self.recipe.answering,
            self.folder.answers_file,
            self.name,
        )
        seconds = [row["seconds"] for row in self.folder.metrics.rows() if "seconds" in row]
        result = {
            "steps": self.recipe.training.max_steps,
            **describe(self.problems),
            "validation_loss": self.folder.metrics.validations()[-1]["validation_loss"],
            "test": test,
            "num_parameters": model.num_parameters(),
            "seconds_per_step": statistics.median(seconds),
            "training_seconds": round(math.fsum(seconds), 3),
        }
        write_whole(self.folder.result_file, json.dumps(result, indent=2) + "\n")

"""One run: train, select by validation, test, and keep everything."""

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from crosscurrent.data.generated import TrainingExamples
from crosscurrent.evaluation.scoring import Examples, Predictions, metrics_of, predict
from crosscurrent.evaluation.segments import refuse_unusable_cache
from crosscurrent.experiments.architectures import AnyRecipe, RLTRecipe
from crosscurrent.experiments.processes import num_processes, rank
from crosscurrent.experiments.recipe import Recipe
from crosscurrent.experiments.run_folder import RunFolder
from crosscurrent.experiments.running import Feedback, run_in_folder, training_arguments
from crosscurrent.experiments.saving import save_model
from crosscurrent.files import partial_name, write_whole
from crosscurrent.recurrence import solver_from_dict
from crosscurrent.training.averaging import WeightAverage, load_average
from crosscurrent.training.checkpoints import checkpoint_folder, complete_steps, keep_only, one_kind_of_write_error
from crosscurrent.training.course import Course, FollowsCourse
from crosscurrent.training.schedules import Steps
from crosscurrent.training.telemetry import best_step
from crosscurrent.training.trainer import Curricula, Progress, Recorder, TaskTrainer
from crosscurrent.training.width import final_norm, fold_logit_scale, parameter_groups, scale_start


def run(recipe: Recipe, path: str | Path, name: str = "") -> dict[str, Any] | None:
    """Do a run, or what is missing of it.

    If the process was stopped, at any moment and in any way, the same call goes on from the last checkpoint and comes
    to the same weights, bit for bit (on a CPU, with the same versions and threads).

    Args:
        recipe: what to do.
        path: its folder.
        name: shown beside the progress bars.

    Returns:
        What `result.json` holds; None in all processes but the first, if there are several.

    Raises:
        ValueError: the folder is another run's, or the loss is not finite.
        BusyError: another process is at work on it.
        OSError: something cannot be written; the last checkpoint is intact.

    Example::

        result = run(load_recipe(Path("my.yaml")), Path("runs/mine"))
    """
    folder = RunFolder(Path(path))
    arguments = training_arguments(recipe.training, folder, recipe.seed)
    if recipe.training.max_tokens is not None and recipe.training.microbatch_size is None and num_processes() > 1:
        raise ValueError(
            "training.max_tokens with several processes needs training.microbatch_size: what one call may take would hang "
            "on how many share the batch."
        )
    if isinstance(recipe.model, AnyRecipe):
        build_model(recipe)  # refuses what only shows in the model itself, before anything is written
    return run_in_folder(
        folder,
        recipe,
        train=lambda: _train(recipe, folder, arguments, name),
        finish=lambda: _finish(recipe, folder, name),
    )


def build_model(recipe: Recipe) -> PreTrainedModel:
    """The recipe's model with its starting weights.

    Raises:
        ValueError: it cannot be evaluated in segments, as the recipe wants.
    """
    set_seed(recipe.seed)
    model = recipe.model.build(recipe.vocab_size)
    if recipe.evaluation.segment_length is not None:
        refuse_unusable_cache(model)
    if recipe.training.mup_base_width is not None:
        final_norm(model)
        scale_start(model, _width_share(recipe))
    return model


def _width_share(recipe: Recipe) -> float:
    base = recipe.training.mup_base_width
    return 1.0 if base is None else base / recipe.model.hidden_size


def _train(recipe: Recipe, folder: RunFolder, arguments: TrainingArguments, name: str) -> None:
    """Train to the end, from the last complete checkpoint that the metrics lead up to, if there is one."""
    usable = set(complete_steps(folder.checkpoints)) & folder.metrics.covered_steps()
    done = max((step for step in usable if _best_until(folder, step) in usable), default=0)
    if rank() == 0:
        folder.metrics.cut_after(done)
        keep_only(folder.checkpoints, {step for step in usable if step <= done})
    course = _course(recipe)
    for row in folder.metrics.rows():
        if row["step"] <= done:
            course.see(row)
    if course.is_over(done):
        return
    if done and rank() == 0:
        tqdm.write(f"{name or folder.path.name} goes on from step {done}", file=sys.stderr)
    with Progress(name or folder.path.name) as progress:
        trainer = _trainer(recipe, folder, arguments, done, course, progress)
        trainer.train(resume_from_checkpoint=str(checkpoint_folder(folder.checkpoints, done)) if done else None)


def _best_until(folder: RunFolder, step: int) -> int:
    return best_step([row for row in folder.metrics.validations() if row["step"] <= step])


def _course(recipe: Recipe) -> Course:
    training, growth, task = recipe.training, recipe.curriculum.growth, recipe.task
    judged = [f"validation_{task.task.metrics[0]}_{length}" for length in task.validation_lengths]
    return Course(
        max_steps=training.max_steps,
        decay_steps=training.decay_steps,
        warmup_steps=training.warmup_steps,
        final_share=training.min_learning_rate / training.learning_rate,
        is_exponential=training.decay_shape == "exponential",
        growth=growth.along(task.train_lengths) if growth is not None else None,
        decay_from_length=training.decay_from_length,
        decay_again_from=training.decay_again_from,
        solved=None if training.solved_at is None else dict.fromkeys(judged, training.solved_at),
    )


def _longest(recipe: Recipe, course: Course) -> Callable[[int], int | None]:
    """For the step after so many the greatest length of the examples."""
    curve = recipe.curriculum.max_length
    if curve is None or curve.growth is not None:
        return lambda step: course.max_length
    of_step = curve.of_step()
    return lambda step: math.floor(of_step(step))


def _state_noise(recipe: Recipe, longest: Callable[[int], int | None]) -> Callable[[int], float] | None:
    """For the step after so many the noise that goes with its greatest length, if noise changes at all."""
    if recipe.curriculum.state_noise is None:
        return None
    assert isinstance(recipe.model, RLTRecipe)
    of_length = Steps([(0, recipe.model.state_noise), *recipe.curriculum.state_noise])
    return lambda step: of_length(longest(step) or 0)


def _trainer(
    recipe: Recipe, folder: RunFolder, arguments: TrainingArguments, done: int, course: Course, progress: Progress
) -> TaskTrainer:
    training, model = recipe.training, build_model(recipe)
    examples = TrainingExamples(
        task=recipe.task.task,
        lengths=recipe.task.train_lengths,
        seed=recipe.data_seeds.train,
        batch_size=training.batch_size,
        group_size=training.microbatch_size or training.batch_size,
        num_steps=training.max_steps,
        prefix_supervision=recipe.task.prefix_supervision,
        longest_share=recipe.curriculum.longest_share,
        max_tokens=training.max_tokens,
    )
    share = _width_share(recipe)
    groups = parameter_groups(model, training.learning_rate, training.weight_decay, share)
    betas = (training.adam_beta1, training.adam_beta2)
    longest = _longest(recipe, course)
    feedback = Feedback(recipe.curriculum, recipe.model, model, _state_noise(recipe, longest))

    def lengths(step: int) -> dict[str, float]:
        greatest = longest(step)
        return {} if greatest is None else {"max_length": greatest}

    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas)
    has_decay = training.decay_steps is not None
    trainer = TaskTrainer(
        model=model,
        examples=examples,
        longest=longest,
        validation=examples_of(recipe, "validation"),
        logit_scale=share,
        average=None if training.ema_decay is None else WeightAverage(training.ema_decay),
        restore=feedback.restore,
        args=arguments,
        optimizers=(optimizer, LambdaLR(optimizer, course.learning_rate_share) if has_decay else None),
        callbacks=[
            Curricula(feedback.apply),
            # Before FollowsCourse: a row tells the length of its own step, which its loss may end.
            Recorder(folder.metrics, folder.checkpoints, lambda step: feedback.values(step) | lengths(step)),
            FollowsCourse(course),
            progress,
        ],
    )
    if rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(folder.tensorboard), purge_step=done + 1)))
    return trainer


def examples_of(recipe: Recipe, split: str) -> Examples:
    """The held-out examples of a recipe: "validation" or "test"."""
    is_test = split == "test"
    return Examples(
        task=recipe.task.task,
        split="test" if is_test else "validation",
        lengths=recipe.task.test_lengths if is_test else recipe.task.validation_lengths,
        count=recipe.task.num_test if is_test else recipe.task.num_validation,
        seed=recipe.data_seeds.test if is_test else recipe.data_seeds.validation,
        prefix_supervision=recipe.task.prefix_supervision,
        batch_size=recipe.evaluation.batch_size,
        segment_length=recipe.evaluation.segment_length,
        solver=None if recipe.evaluation.solver is None else solver_from_dict(recipe.evaluation.solver),
    )


def _finish(recipe: Recipe, folder: RunFolder, name: str) -> None:
    """Select, test and write the result."""
    validations = folder.metrics.validations()
    selected = best_step(validations)
    checkpoint = checkpoint_folder(folder.checkpoints, selected)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if recipe.training.ema_decay is not None:
        load_average(model, checkpoint)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    if recipe.training.mup_base_width is not None:
        fold_logit_scale(model, _width_share(recipe))
    with one_kind_of_write_error(str(folder.model)):
        save_model(model, None, folder.model, overwrite=True)
    answers = _test(model, recipe, name or folder.path.name)
    with one_kind_of_write_error(str(folder.predictions_file)):
        _save_predictions(answers, folder.predictions_file)
    seconds = [row["seconds"] for row in folder.metrics.rows() if "seconds" in row]
    result = {
        "selected_step": selected,
        "validation": next(row for row in validations if row["step"] == selected),
        "test": {
            str(length): metrics_of(recipe.task.task, said) | {"loss": said.loss, "num_examples": len(said.targets)}
            for length, said in answers.items()
        },
        "num_parameters": model.num_parameters(),
        "seconds_per_step": statistics.median(seconds),
        "training_seconds": round(math.fsum(seconds), 3),
    }
    write_whole(folder.result_file, json.dumps(result, indent=2) + "\n")


def _test(model: PreTrainedModel, recipe: Recipe, name: str) -> dict[int, Predictions]:
    examples = examples_of(recipe, "test")
    answers = {}
    with tqdm(total=sum(examples.lengths), desc=f"{name}: test", unit="position", leave=False) as bar:
        for length, said in predict(model, examples, generates=True):
            answers[length] = said
            bar.update(length)
    return answers


def _save_predictions(answers: dict[int, Predictions], file: Path) -> None:
    """[N, S] int32 for each length: `LENGTH.predicted`, `LENGTH.target` and, where asked, `LENGTH.generated`."""
    tensors: dict[str, torch.Tensor] = {}
    for length, said in answers.items():
        parts = {"predicted": said.predicted, "target": said.targets, "generated": said.generated}
        tensors |= {
            f"{length}.{part}": ids.to(torch.int32).contiguous() for part, ids in parts.items() if ids is not None
        }
    partial = partial_name(file)
    try:
        save_file(tensors, partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)

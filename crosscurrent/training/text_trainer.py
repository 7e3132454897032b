"""The Hugging Face Trainer for rows of text: over processes and shards, guarded, with throughput in the log.

Shapes: B rows, T tokens.
"""

import math
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import nested_gather

from crosscurrent.models.outputs import IGNORED
from crosscurrent.recurrence import Solver
from crosscurrent.training.guard import MOST_SKIPS, StepGuard
from crosscurrent.training.nonfinite import NonFiniteError
from crosscurrent.training.throughput import Throughput
from crosscurrent.training.trainer import PREFIX, RunTrainer

SKIPPED = "guard/skipped"


class TextTrainer(RunTrainer):
    """Trains a causal language model on rows of text.

    Args:
        model: to train.
        validation: rows with input_ids, labels, ... [T], as `PackedRows` gives them.
        validation_solver: None: the model's configured one.
        guard: looks at each step before it reaches the weights.
        throughput: measures each step; None: nothing does.
        kwargs: as RunTrainer.
    """

    def __init__(
        self,
        model: nn.Module,
        validation: Dataset[dict[str, Tensor]],
        validation_solver: Solver | None,
        guard: StepGuard,
        throughput: Throughput | None = None,
        **kwargs: Any,
    ):
        super().__init__(model=model, **kwargs)
        self.validation, self.validation_solver = validation, validation_solver
        self.guard, self.throughput = guard, throughput
        self._step_loss: Tensor | None = None
        self._logged_loss = 0.0
        self._extra: dict[str, float] = {}
        self._num_skipped = 0
        self.add_callback(_AtBegin(self.restore_optimizer))

    def create_accelerator_and_postprocess(self) -> None:
        """As transformers; accelerate takes shards for GPUs only, and here they are for CPUs too."""
        super().create_accelerator_and_postprocess()
        state, arguments = self.accelerator.state, self.args.fsdp_plugin_args
        if arguments is None or state.distributed_type != DistributedType.MULTI_CPU:
            return
        plugin = FullyShardedDataParallelPlugin(**arguments)
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        self._optimized = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def restore_optimizer(self) -> None:
        """Give the optimizer the parameters that it was made with.

        accelerate puts parameters into it by the address of their memory, and those that are empty on this process, as a
        scalar's shards are on all but one, have none to tell them apart.
        """
        assert self.optimizer is not None
        for group, parameters in zip(self.optimizer.param_groups, self._optimized, strict=True):
            group["params"][:] = parameters

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.restore_optimizer()
        super()._load_optimizer_and_scheduler(checkpoint)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As transformers. Workers leave a SIGTERM, which launchers send to all processes, to the one that trains."""
        loader: Any = super().get_train_dataloader()
        own = getattr(loader, "base_dataloader", loader)  # accelerate's is a wrapper
        own.worker_init_fn = partial(_start_worker, own.worker_init_fn)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if self.throughput is not None:
            self.throughput.start()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """As transformers. Here loss and gradients of a step are known, and the weights are as they were."""
        norm = super()._clip_grad_norm(model)
        assert self._step_loss is not None
        loss = float(nested_gather(self._step_loss, self.args.parallel_mode).mean())
        self._step_loss, self._extra, self._logged_loss = None, {}, loss
        # With fp16 the scaler leaves out steps whose gradients overflow, and tries a smaller scale.
        norm_to_judge = 0.0 if self.args.fp16 else float(norm)
        fault = self.guard.fault(loss, norm_to_judge, self._losses_before())
        if fault is None:
            self._num_skipped = 0
        else:
            self._answer(*fault, model)
        return norm

    def _losses_before(self) -> list[float]:
        """Of the last steps that were made; the log is part of every checkpoint."""
        rows = self.state.log_history[-4 * self.guard.spike_window :]
        return [row["loss"] for row in rows if "loss" in row and SKIPPED not in row]

    def _answer(self, action: str, cause: str, model: nn.Module) -> None:
        step = self.state.global_step + 1
        self._num_skipped += 1
        if action == "stop" or self._num_skipped >= MOST_SKIPS:
            again = f" {self._num_skipped} steps were skipped in a row." if self._num_skipped > 1 else ""
            raise NonFiniteError(
                f"step {step}: {cause}. The step was not made.{again} Lower training.learning_rate, or look at the rows of "
                "this step (guard.nonfinite and guard.spike say what becomes of such steps). The last checkpoint is intact."
            )
        for parameter in model.parameters():
            parameter.grad = None  # so the optimizer passes over it, its averages too
        self._extra = {SKIPPED: 1.0}
        self._tr_loss = torch.zeros_like(self._tr_loss)  # which transformers subtracts from itself: NaN would stay
        if self.state.is_world_process_zero:
            tqdm.write(f"step {step} is skipped: {cause}", file=sys.stderr)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As transformers, with what was measured of the step."""
        if "loss" in logs:
            measured = self.throughput.values() if self.throughput is not None else {}
            logs |= {"loss": self._logged_loss} | measured | self._extra
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean loss over all predicted tokens of the validation rows, in nats, and its perplexity.

        Processes share the rows. Where layers are sharded all of them have to take part in every forward call, so a
        process whose rows are used up computes some again, which do not count.
        """
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # loss, tokens
        for rows, counts in self._shares():
            batch = {name: values.to(self.args.device) for name, values in self.data_collator(rows).items()}
            solver = {} if self.validation_solver is None else {"solver": self.validation_solver}
            with self.accelerator.autocast():
                loss = model(**batch, **solver, use_cache=False).loss
            num_tokens = (batch["labels"][:, 1:] != IGNORED).sum()
            if counts and num_tokens:
                total += torch.stack([loss.double() * num_tokens, num_tokens.double()])
        model.train()
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        loss = float(total[0] / total[1])
        return {f"{PREFIX}loss": loss, f"{PREFIX}perplexity": math.exp(min(loss, 700.0))}

    def _shares(self) -> Iterator[tuple[list[dict[str, Tensor]], bool]]:
        """The batches of this process, and whether each counts."""
        size, rank, num_processes = self.args.per_device_train_batch_size, self.args.process_index, self.args.world_size
        num_rows = len(self.validation)  # type: ignore[arg-type]
        starts = range(0, num_rows, size)
        for first in range(0, len(starts), num_processes):
            number = first + rank
            start = starts[number] if number < len(starts) else 0
            rows = [self.validation[index] for index in range(start, min(start + size, num_rows))]
            yield rows, number < len(starts)


def _start_worker(start: Callable[[int], None] | None, worker_id: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start is not None:
        start(worker_id)


class _AtBegin(TrainerCallback):
    """Calls something when everything is ready to train."""

    def __init__(self, what: Callable[[], None]):
        self.what = what

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.what()

"""What each process of tests/test_distributed.py runs, by torchrun: all cases, of which rank 0 saves what came out.

torchrun --nproc-per-node 2 --standalone -m tests.distributed_worker FOLDER
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import crosscurrent as cc
from crosscurrent.data.labels import PredictableLabels
from crosscurrent.training.nonfinite import StopOnNonFinite
from crosscurrent.training.optimization import fusion_optimizer
from tests.subjects import recurrent_parameters, token_ids
from tests.test_trainer_features import Rows, padded


class Case(NamedTuple):
    """hidden_size 256 makes transfers slow enough for a race to show; kept_in is the base's dtype."""

    wrapper: str
    hidden_size: int = 16
    trains: str = "all"
    checkpointing: bool = False
    kept_in: str = "float64"
    solver: str = "jacobi"

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = [
    *(Case("ddp", 16, trains, checkpointing) for trains in ("all", "fusion") for checkpointing in (False, True)),
    *(Case("fsdp2", 16, trains, checkpointing) for trains in ("all", "fusion") for checkpointing in (False, True)),
    *(Case("fsdp2", 256, "all", checkpointing) for checkpointing in (False, True)),
    Case("fsdp2", kept_in="bfloat16"),
    *(Case(wrapper, solver="sequential") for wrapper in ("ddp", "fsdp2")),
]


def build(case: Case) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=case.hidden_size,
        intermediate_size=2 * case.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=case.hidden_size**-0.5,
        max_position_embeddings=64,
    )
    base: Any = LlamaForCausalLM(config).to(getattr(torch, case.kept_in))
    model = cc.retrofit(base, 1, 3, solver=cc.Jacobi(3, 2) if case.solver == "jacobi" else cc.Sequential())
    with torch.no_grad():
        model.fusion.current_scale.fill_(0.3)
        model.fusion.recurrent_scale.fill_(0.7)
    if case.trains == "fusion":
        new = recurrent_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in new)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batches() -> Iterator[Tensor]:
    """[4, 7], the whole batch of each of two steps."""
    for seed in (1, 2):
        yield token_ids(4, 7, seed=seed)


def train(model: Any, parameters: dict[str, Any], rows: slice) -> dict[str, Tensor]:
    """Gradients of the first step and the weights after the last one, put together again if they are in shards."""
    optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=0.05, momentum=0.9)
    found: dict[str, Tensor] = {}
    for ids in batches():
        model(ids[rows], labels=ids[rows]).loss.backward()
        if not found:
            found |= {f"gradient of {name}": whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: whole(parameter.detach()) for name, parameter in parameters.items()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def sharded(model: Any) -> Any:
    """As accelerate does it: the modules that are not to be split, each by itself, then the rest."""
    assert {"LlamaDecoderLayer", "GatedFusion", "NormalizedSum"} == set(model._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module)
    return fully_shard(model)


def run(case: Case, folder: Path) -> None:
    rank, model = dist.get_rank(), build(case)
    parallel = DistributedDataParallel(model) if case.wrapper == "ddp" else sharded(model)
    found = train(parallel, dict(model.named_parameters()), slice(2 * rank, 2 * rank + 2))
    state = None
    if case.wrapper == "fsdp2":
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(found, folder / f"{case}.pt")
        model.save_pretrained(folder / str(case), state_dict=state)


def run_trainer(folder: Path, num_processes: int) -> dict[str, Tensor]:
    """transformers' Trainer, rows of unequal lengths, two microbatches per step."""
    args = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4 // num_processes,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        gradient_checkpointing=True,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        build(Case("ddp")),
        args,
        train_dataset=Rows([3, 9, 5, 2, 7, 6, 4, 8] * 2),
        data_collator=PredictableLabels(padded),
        optimizer_cls_and_kwargs=fusion_optimizer(args, 0.1),
        callbacks=[StopOnNonFinite()],
    )
    trainer.train()
    assert trainer.model is not None
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def refusal_of_reentrant_checkpointing() -> str:
    model, ids = build(Case("ddp")), next(batches())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    try:
        DistributedDataParallel(model)(ids, labels=ids)
    except ValueError as error:
        return str(error)
    return "it was not refused"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in CASES:
        run(case, folder)
    message, weights = refusal_of_reentrant_checkpointing(), run_trainer(folder / "trainer", 2)
    if dist.get_rank() == 0:
        (folder / "refusal").write_text(message)
        torch.save(weights, folder / "trainer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The cost model: memory against the storages that a step has in use, time by laws that any estimate must keep."""

import re
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.experiments.scaling import (
    AUTOCAST,
    FLOAT32,
    GPUS,
    KINDS,
    SHAPES,
    Assumptions,
    best_plan,
    make_subject,
    step_memory,
)
from crosscurrent.experiments.scaling.plan import Estimate, Layout
from tests.test_cli import assert_one_line_of_error

ROWS, TOKENS = 4, 48
H100 = GPUS["h100"]
LLAMA: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
RLT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}


def llama(**changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**(LLAMA | changes)))


def t2mlr() -> Any:
    return cc.retrofit(llama(), 1, 3)


def rlt(**changes: Any) -> Any:
    return cc.RLTForCausalLM(cc.RLTConfig(**(RLT | changes)))


class InUse(TorchDispatchMode):
    """The most bytes that storages made within it took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._sizes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # so that a storage is counted once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = storage.nbytes()
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, size: int) -> None:
        self._now -= size


def allocated(model: Any, autocast: bool, checkpointing: bool, **settings: Any) -> int:
    """The most bytes that a training step has in use at once, the weights left out."""
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(LLAMA["vocab_size"], (ROWS, TOKENS))
    with InUse() as in_use:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids, use_cache=False, **settings).loss
        loss.backward()
    return in_use.most


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (llama, {}),
        (lambda: llama(num_hidden_layers=1), {}),
        (lambda: llama(num_key_value_heads=1), {}),
        (lambda: llama(vocab_size=6000, num_hidden_layers=1), {}),
        (lambda: llama(tie_word_embeddings=False), {}),
        (t2mlr, {}),
        (t2mlr, {"solver": cc.Jacobi(6, 4)}),
        (t2mlr, {"solver": cc.Jacobi(5, gradient=cc.LastPasses(1))}),
        (lambda: rlt(feedback_interval=None), {}),
        (rlt, {"solver": cc.Jacobi(3, 2)}),
        (rlt, {"solver": cc.Sweeps(16, 2, gradient=cc.Implicit(2))}),
    ],
)
def test_memory_of_a_step(make: Callable[[], Any], settings: dict[str, Any], autocast: bool) -> None:
    """Within 10 %: what is left are norms' scales, positions, masks and what elementwise steps need for a moment."""
    model = make()
    memory = step_memory(model, ROWS, TOKENS, AUTOCAST if autocast else FLOAT32, settings.get("solver"))
    assert memory.weights == 4 * sum(parameter.numel() for parameter in model.parameters())
    calculated = memory.first_backward - memory.weights
    assert calculated == pytest.approx(allocated(model, autocast, False, **settings), rel=0.1)


@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Sequential(recompute_every=12)])
def test_memory_of_dependent_steps(solver: Any) -> None:
    memory = step_memory(rlt(), ROWS, TOKENS, FLOAT32, solver)
    calculated = memory.first_backward - memory.weights
    assert calculated == pytest.approx(allocated(rlt(), False, False, solver=solver), rel=0.1)


@pytest.mark.parametrize("make", [lambda: llama(num_hidden_layers=10), t2mlr])
def test_memory_under_checkpointing(make: Callable[[], Any]) -> None:
    memory = step_memory(make(), ROWS, TOKENS, FLOAT32, checkpointing=True)
    calculated = memory.first_backward - memory.weights
    assert calculated == pytest.approx(allocated(make(), False, True), rel=0.15)


def test_memory_of_an_implicit_gradient_does_not_grow_with_iterations() -> None:
    few, many = (
        step_memory(t2mlr(), 1, 64, FLOAT32, cc.Jacobi(iterations, gradient=cc.Implicit(2))) for iterations in (2, 40)
    )
    assert few == many
    kept = [step_memory(t2mlr(), 1, 64, FLOAT32, cc.Jacobi(8, passes)).activations for passes in (1, 2, 3)]
    assert kept[2] - kept[1] == kept[1] - kept[0] > 0


def test_memory_of_other_models_is_not_guessed() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel is not known"):
        from transformers import GPT2Config

        step_memory(AutoModelForCausalLM.from_config(GPT2Config(n_embd=8, n_layer=1, n_head=1)), 1, 4, FLOAT32)


def estimate(shape: str, kind: int, num_gpus: int, batch_size: int = 256) -> Estimate:
    return Estimate(make_subject(shape, KINDS[kind]), H100, num_gpus, 2048, batch_size, Assumptions())


def test_shapes_have_the_published_sizes() -> None:
    sizes = {shape: make_subject(shape, KINDS[0]).num_parameters for shape in SHAPES}
    assert sizes["135m"] == 134_515_008 and sizes["361m"] == 361_821_120
    assert sizes["1b"] == pytest.approx(1.07e9, rel=0.01) and sizes["7b"] == pytest.approx(6.88e9, rel=0.01)
    with pytest.raises(ValueError, match="Did you mean '135m'"):
        make_subject("135mm", KINDS[0])


def test_more_gpus_share_the_work_and_the_state() -> None:
    """Compute falls as 1 / n; so do weights, gradients and optimizer states under FSDP2, while activations stay."""
    for num_gpus in (2, 8, 64):
        estimated = estimate("7b", 0, num_gpus)
        layout = Layout("FSDP2", num_gpus, num_gpus, 1, 256 // num_gpus, False)
        alone = Layout("DDP", 1, 1, 1, 256, False)
        assert estimated.compute(layout) == pytest.approx(estimated.compute(alone) / num_gpus)
        whole = estimated.subject.step_memory(1, 2048, False)
        state = whole.weights + whole.gradients + whole.optimizer
        assert estimated.memory(layout) > whole.transient + state / num_gpus
        assert estimated.memory(layout) < whole.transient + state / num_gpus + 0.15 * state
        assert estimated.communication(layout) > 0 == estimated.communication(alone)


def test_passes_of_the_range_gather_nothing_again() -> None:
    """The weights of the recurrence are gathered once per step, so they are sent less often than the base's, and stay."""
    base, default, published = (estimate("7b", number, 8) for number in (0, 1, 2))
    for layout in (Layout("DDP", 8, 1, 1, 32, False), Layout("FSDP2", 8, 8, 1, 32, False)):
        assert default.communication(layout) == published.communication(layout)
    sharded = Layout("FSDP2", 8, 8, 1, 32, False)
    grown = default.subject.num_parameters / base.subject.num_parameters
    assert default.communication(sharded) < grown * base.communication(sharded)
    assert default.memory(sharded) > grown * base.memory(sharded)


def test_dependent_steps_do_not_get_shorter_with_more_gpus_but_fewer_with_sweeps() -> None:
    layouts = [Layout("DDP", num_gpus, 1, 1, 1, False) for num_gpus in (8, 64)]
    rlt_1, sweeps = estimate("135m", 3, 8), estimate("135m", 4, 8)
    assert rlt_1.launching(layouts[0]) == rlt_1.launching(layouts[1]) > 10 * sweeps.launching(layouts[0])
    plan = best_plan(make_subject("135m", KINDS[3]), H100, 64)
    assert plan is not None and plan.limit == "dependent steps"


def test_what_does_not_fit_has_no_plan_and_what_has_no_rows_is_named() -> None:
    assert best_plan(make_subject("7b", KINDS[0]), H100, 1) is None
    sharded = best_plan(make_subject("7b", KINDS[0]), H100, 8)
    assert sharded is not None and sharded.layout.parallelism == "FSDP2" and sharded.memory < 0.9 * H100.memory
    idle = best_plan(make_subject("135m", KINDS[0]), H100, 512, batch_size=64)
    assert idle is not None and idle.limit.endswith("batch") and idle.layout.num_used == 64


def test_sweeps_are_not_checkpointed() -> None:
    assert not any(layout.checkpointing for layout in estimate("7b", 4, 8).layouts())
    assert any(layout.checkpointing for layout in estimate("7b", 1, 8).layouts())


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["scaling", *map(str, arguments)])


def test_the_command_prints_a_table_for_each_shape() -> None:
    finished = run("--model", "135m", "--gpus", "1,8", "--gpu", "a100")
    assert finished.exit_code == 0, finished.output
    lines = finished.stdout.splitlines()
    assert lines[0] == "135m on A100, 256 rows of 2,048 tokens a step"
    assert [line.split()[0] for line in lines[2:4]] == ["model", "base,"] and len(lines) == 3 + 2 * len(KINDS) + 1


@pytest.mark.parametrize("arguments", [["--gpus", "1,x"], ["--gpus", ""], ["--model", "2b"], ["--gpu", "abacus"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [["--gpus", "3"], ["--gpus", "0"], ["--batch-size", "100"], ["--efficiency", "0"]]
)
def test_what_cannot_be_planned_is_said_in_a_line(arguments: list[str]) -> None:
    assert_one_line_of_error(run(*arguments))


DOCS = Path(__file__).parent.parent / "docs" / "scaling.md"


def test_the_tables_of_the_docs_are_what_the_command_prints() -> None:
    (command,) = re.findall(r"^    crosscurrent scaling (--markdown.*)$", DOCS.read_text(), re.MULTILINE)
    printed = run(*command.split()).stdout.strip()
    assert printed in DOCS.read_text()


def test_the_measured_table_of_the_docs_is_what_the_benchmark_prints(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = runpy.run_path(str(DOCS.parent.parent / "benchmarks" / "scaling.py"))
    benchmark["main"]([])
    assert capsys.readouterr().out.strip() in DOCS.read_text()

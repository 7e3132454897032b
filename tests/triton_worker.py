"""What `test_triton.py` runs in processes of their own: the kernels in Triton's interpreter, and in its compiler."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import crosscurrent as cc
from crosscurrent.experiments.bench.case import Conditions
from crosscurrent.experiments.bench.fusion import FUSION
from crosscurrent.experiments.bench.running import run_case
from crosscurrent.recurrence import GatedFusion, Merge, NormalizedSum
from crosscurrent.recurrence.kernels import use_triton
from tests.subjects import gradients, make_rlt, make_t2mlr, moved, token_ids

# B, T, tokens of the state, D: odd; one state for all tokens; more than a block; a single token
SHAPES = {"states": (2, 3, 3, 17), "one_state": (2, 3, 1, 33), "wide": (1, 1, 1, 1100), "single": (1, 1, 1, 3)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FUSIONS: dict[str, Callable[[int], Any]] = {
    "gated_fusion": GatedFusion,
    "gated_fusion_projected": lambda width: GatedFusion(width, gates_read="projected_state"),
    "merge": lambda width: Merge(width, feedback_scale=0.7),
}
CARRIES: dict[str, Callable[[int], Any]] = {
    "normalized_sum": lambda width: NormalizedSum(width, eps=0.1),
    "normalized_sum_detached": lambda width: NormalizedSum(width, detach_residual=True),
    "normalized_sum_narrow": lambda width: NormalizedSum(width, state_dtype=torch.bfloat16),
}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "rlt1": (make_rlt, cc.Sequential()),
    "rlt2": (lambda: make_rlt(feedback_interval=3), cc.Sequential()),
    "rlt2_jacobi": (lambda: make_rlt(feedback_interval=3), cc.Jacobi(2, 2)),
    "t2mlr": (lambda: make_t2mlr("llama"), cc.Sequential()),
    "t2mlr_jacobi": (lambda: make_t2mlr("llama"), cc.Jacobi(3, 2)),
    "t2mlr_recomputed": (lambda: make_t2mlr("llama"), cc.Sequential(recompute_every=2)),
}


def compared(module: nn.Module, run: Callable[[nn.Module], dict[str, Tensor]]) -> dict[str, Any]:
    """What the module gives with the kernels, against the plain code in float64 on the same numbers.

    Returns:
        errors: of each output and gradient [with the kernels, plain], relative to its largest element; dtypes: the same of
        those whose dtype differs; calls: how often each kernel was called; repeats: whether a second run gave the same in
        every bit.
    """
    from crosscurrent.recurrence import triton_kernels

    plain = run(module)
    calls: Counter[str] = Counter()
    real = {name: getattr(triton_kernels, name) for name in ("gated_fusion", "merge", "normalized_sum")}
    for name, function in real.items():
        setattr(triton_kernels, name, lambda *given, n=name, f=function: calls.update([n]) or f(*given))
    with use_triton():
        found, again = run(module), run(module)
        before = dict(calls)
        exact = run(module.double())
        assert calls == before, "float64 must be left to the plain code"
    for name, function in real.items():
        setattr(triton_kernels, name, function)
    return {
        "errors": {n: [relative_error(found[n], exact[n]), relative_error(plain[n], exact[n])] for n in exact},
        "dtypes": [[str(found[n].dtype), str(plain[n].dtype)] for n in exact if found[n].dtype != plain[n].dtype],
        "calls": {name: count // 2 for name, count in before.items()},
        "repeats": all(torch.equal(found[n], again[n]) for n in found),
    }


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).abs().max() / exact.abs().max()).item()


def moved_to(dtype: torch.dtype, module: nn.Module) -> nn.Module:
    return moved(module).to(dtype)


def inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x, r, and the gradient of the output: columns of longer tensors, as solvers cut them, and one that is transposed."""
    batch_size, num_tokens, num_states, width = shape
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch_size, num_tokens + 2, width, generator=generator).to(dtype)[:, 1:-1]
    r = torch.randn(batch_size, num_states + 1, width, generator=generator).to(state_dtype)[:, 1:]
    gradient = torch.randn(width, batch_size, num_tokens, generator=generator).to(dtype).permute(1, 2, 0)
    return x, r, gradient


def as_module(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Leaves with the tensors' values, in float64 if the module is."""
    return [(tensor.double() if dtype == torch.float64 else tensor).detach().requires_grad_() for tensor in tensors]


def outcome(module: nn.Module, out: Tensor, gradient: Tensor, **leaves: Tensor) -> dict[str, Tensor]:
    asked = leaves | {name: one for name, one in module.named_parameters() if name != "start_state"}
    asked = {name: one for name, one in asked.items() if one.requires_grad}
    found = torch.autograd.grad(out, list(asked.values()), gradient.to(out.dtype), allow_unused=True)
    return {"out": out.detach()} | {n: g for n, g in zip(asked, found, strict=True) if g is not None}


def fusion(kind: str, shape: str, dtype: str) -> dict[str, Any]:
    tensors = inputs(SHAPES[shape], DTYPES[dtype], DTYPES[dtype])

    def run(module: nn.Module) -> dict[str, Tensor]:
        x, r, gradient = as_module(tensors, next(module.parameters()).dtype)
        return outcome(module, module(x, r), gradient, x=x, r=r)

    return compared(moved_to(DTYPES[dtype], FUSIONS[kind](SHAPES[shape][-1])), run)


def fusion_under_autocast(kind: str) -> dict[str, Any]:
    """Stream and weights in float32, products in bfloat16."""
    tensors = inputs(SHAPES["one_state"], torch.float32, torch.float32)

    def run(module: nn.Module) -> dict[str, Tensor]:
        dtype = next(module.parameters()).dtype
        x, r, gradient = as_module(tensors, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float64):
            out = module(x, r)
        return outcome(module, out, gradient, x=x, r=r)

    return compared(moved_to(torch.float32, FUSIONS[kind](SHAPES["one_state"][-1])), run)


def carry(kind: str, shape: str, dtype: str) -> dict[str, Any]:
    """A third of the tokens are not fused, and find NaN in what they are not to read."""
    y, r, gradient = inputs(SHAPES[shape], DTYPES[dtype], torch.float32)
    fused = (torch.arange(y.shape[0] * y.shape[1]).view(y.shape[0], -1, 1) % 3) != 1
    if r.shape[1] == y.shape[1]:
        r = torch.where(fused, r, torch.nan)

    def run(module: Any) -> dict[str, Tensor]:
        is_exact = module.norm.weight.dtype == torch.float64
        leaves = as_module((y, r, gradient), module.norm.weight.dtype)
        module.state_dtype = None if is_exact else asked
        return outcome(module, module(*leaves[:2], fused), leaves[2], y=leaves[0], r=leaves[1])

    module: Any = CARRIES[kind](SHAPES[shape][-1])
    asked = module.state_dtype
    return compared(moved_to(torch.float32, module), run)


def model(kind: str) -> dict[str, Any]:
    """A whole model in float32: logits and gradients of its loss, some tokens of a row padding."""
    make, solver = MODELS[kind]
    ids = token_ids(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    def run(module: Any) -> dict[str, Tensor]:
        output = module(ids, attention_mask=mask, labels=ids, solver=solver, use_cache=False)
        return {"logits": output.logits.detach()} | gradients(module, output.loss)

    return compared(make().float(), run)


def identity() -> None:
    """A new fusion returns its stream bit for bit, whatever its dtype."""
    with use_triton():
        for dtype in DTYPES.values():
            fuse, x = GatedFusion(33).to(dtype), torch.randn(2, 3, 33).to(dtype)
            z = fuse(x, torch.randn(2, 1, 33))
            assert type(z.grad_fn).__name__ == "_GatedFusionBackward" and torch.equal(z, x)


def compiled_code() -> None:
    """torch.compile makes its own kernels of the plain code."""
    fuse, x, r = moved_to(torch.float32, GatedFusion(17)), torch.randn(2, 3, 17), torch.randn(2, 1, 17)
    plain = fuse(x, r)
    with use_triton():
        assert torch.equal(torch.compile(fuse, backend="eager", fullgraph=True)(x, r), plain)


def refuses_second_derivatives() -> None:
    x = torch.randn(1, 2, 5, requires_grad=True)
    with use_triton():
        out = NormalizedSum(5)(x, torch.zeros(1, 2, 5), torch.ones(1, 2, 1, dtype=torch.bool))
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    try:
        first.sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error)
        return
    raise AssertionError("not refused")


def benchmark() -> None:
    """It runs. How long the interpreter takes tells nothing."""
    result = run_case(FUSION, Conditions(size="tiny"), repeats=1)
    assert all(len(subject["seconds"]) == 1 for subject in result["subjects"])


COMPARISONS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{kind}-{shape}-{dtype}": partial(run, kind, shape, dtype)
        for run, kinds in ((fusion, FUSIONS), (carry, CARRIES))
        for kind in kinds
        for shape in SHAPES
        for dtype in (DTYPES if shape == "one_state" else ["float32"])
    },
    **{f"{kind}-autocast": partial(fusion_under_autocast, kind) for kind in FUSIONS},
    **{f"model-{kind}": partial(model, kind) for kind in MODELS},
}
CHECKS = {one.__name__: one for one in (identity, compiled_code, refuses_second_derivatives, benchmark)}


def interpret() -> dict[str, Any]:
    """Everything above, by name. Needs TRITON_INTERPRET=1."""
    from crosscurrent.recurrence import triton_kernels

    triton_kernels._MOST_PROGRAMS = 2  # so that each has several rows
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory from torch.empty with NaN
    for check in CHECKS.values():
        check()
    return {name: compare() for name, compare in COMPARISONS.items()}


def compile_kernels() -> dict[str, int]:
    """Bytes of machine code of every kernel, for several types and kinds of GPU. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from crosscurrent.recurrence import triton_kernels

    sizes = {}
    kernels = {n: one for n, one in vars(triton_kernels).items() if n.endswith(("_forward", "_backward"))}
    for name, kernel in kernels.items():
        # Triton makes constants of arguments that are 1.
        for dtype, constants, architecture in (
            ("fp32", {"block": 1024}, 80),
            ("bf16", {"block": 1024, "num_tokens": 1}, 90),
            ("fp16", {"block": 16, "num_tokens": 1, "width": 1}, 90),
        ):
            types = {one: "constexpr" if one in constants else argument_type(one, dtype) for one in kernel.arg_names}
            source = ASTSource(kernel, types, constexprs=constants)
            built = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            sizes[f"{name} {dtype} {architecture}"] = len(built.asm["cubin"])
    return sizes


def argument_type(name: str, dtype: str) -> str:
    if name in ("num_tokens", "num_rows", "width") or name.endswith(("_batch", "_token")):
        return "i32"
    others = {"eps": "fp32", "scale": "fp32", "fused": "*i1", "grad_scales": "*fp32", "grad_weight": "*fp32"}
    return others.get(name, f"*{dtype}")


if __name__ == "__main__":
    print(json.dumps({"interpret": interpret, "compile": compile_kernels}[sys.argv[1]]()))

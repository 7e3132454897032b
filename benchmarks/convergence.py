"""How fast each solver converges, and how near the gradient of each rule comes to full back-propagation through time.

    python benchmarks/convergence.py --output results/solvers --text wikipedia.jsonl --gsm8k gsm8k_train.jsonl

The subjects: a small T2MLR trained here on bit parity, one trained on the bytes of a text, SmolLM2-135M with random gates,
nearly closed and wide open, on GSM8K problems, and small RLTs trained on products of permutations with a feedback scale
of 0.1 and of 1. Each is measured on one batch that it was not trained on. `--only NAME` leaves out the others.

Costs are counted in forward passes of the recurrent range over all tokens: a differentiated pass is 3, a term of an implicit
gradient, which leaves the weights out, 1; the guess is 1 if it takes a pass.

    convergence.csv   per solver and number of passes k: residual, and error of the logits against sequential solving
    passes.csv        passes to a residual, and to an error, of 1e-2 and of 1e-3
    gradients.csv     per solver and rule: cost, cosine to the full gradient of the recurrent weights and the range
    *.png, *.svg      the same as figures;  facts.json  versions, sizes, learned gates
"""

import argparse
import csv
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig

import crosscurrent as cc
from crosscurrent.data.generated import TrainingExamples, held_out
from crosscurrent.tasks import get_task

THRESHOLDS = (1e-2, 1e-3)
RANGE_SHARE = 0.2  # of the layers, in the ratio of a training step to the base's
PUBLISHED = (16, cc.LastPasses(4))
TRAINED_BY = cc.Jacobi(iterations=8, backward_iterations=4)


@dataclass(frozen=True)
class Subject:
    """A model and a batch: input ids and targets [B, T], where a target is what the logits at its place should say."""

    name: str
    model: Any
    ids: Tensor
    targets: Tensor
    facts: dict[str, Any]

    def run(self, solver: Any) -> tuple[Tensor, Any]:
        """The loss, and the output."""
        output = self.model(self.ids, solver=solver, use_cache=False)
        return F.cross_entropy(output.logits.flatten(0, 1).float(), self.targets.flatten()), output

    def gradient(self, solver: Any) -> tuple[float, Tensor]:
        """The loss, and its gradient by the weights of the recurrence and of the range, in one vector."""
        weights = measured_weights(self.model)
        loss, _ = self.run(solver)
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        flat = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
        return loss.item(), torch.cat([gradient.flatten().double() for gradient in flat])


def measured_weights(model: Any) -> list[Tensor]:
    if isinstance(model, cc.RLTForCausalLM):
        return [*model.model.merge.parameters(), *model.model.decoder.parameters()]
    layers = list(model.layers)[model.config.layer_start : model.config.layer_end]
    return [weight for module in (model.fusion, model.carry, *layers) for weight in module.parameters()]


# Solvers and what they cost, in forward passes of the range.


@dataclass(frozen=True)
class Way:
    """A way of solving: its name, the solver for k passes and a gradient rule, and the passes before the first."""

    name: str
    solver: Callable[[int, Any], Any]
    guess_passes: int


def jacobi(scan: bool, guess: str) -> Way:
    name = ("carry-scan Jacobi" if scan else "Jacobi") + (", inputs as guess" if guess == "inputs" else "")
    return Way(
        name,
        lambda passes, rule: cc.Jacobi(passes, gradient=rule, scan=scan, guess=guess),  # type: ignore[arg-type]
        guess_passes=int(guess == "pass"),
    )


def sweeps(chunk_size: int) -> Way:
    """k passes: the last one is that of the gradient rule."""
    name = f"sweeps of {chunk_size}" if chunk_size > 2 else "interleaved (sweeps of 2)"
    return Way(name, lambda passes, rule: cc.Sweeps(chunk_size, max(passes - 1, 1), gradient=rule), guess_passes=1)


JACOBIS = (jacobi(False, "pass"), jacobi(True, "pass"), jacobi(False, "inputs"), jacobi(True, "inputs"))
SWEEPS = (sweeps(2), sweeps(8), sweeps(16))
RULES: tuple[cc.LastPasses | cc.Implicit, ...] = (
    *(cc.LastPasses(passes) for passes in (1, 2, 3, 4, 8)),
    *(cc.Implicit(terms) for terms in (0, 1, 2, 3, 4, 8)),
)


def ways_for(subject: Subject) -> tuple[Way, ...]:
    scans = not isinstance(subject.model, cc.RLTForCausalLM)
    return (*(way for way in JACOBIS if scans or "scan" not in way.name), *SWEEPS)


def backward_cost(rule: Any) -> int:
    """Beyond the forward passes."""
    return 2 * rule.passes if isinstance(rule, cc.LastPasses) else 2 + rule.iterations


def step_ratio(cost: int) -> float:
    """A training step to that of the base, layers outside of the range and passes counted alike."""
    return (3 * (1 - RANGE_SHARE) + RANGE_SHARE * cost) / 3


# Measuring.


def convergence(subject: Subject, most: int) -> Iterator[dict[str, Any]]:
    with torch.no_grad():
        exact = subject.run(cc.Sequential())[1].logits
        most = min(most, subject.ids.shape[1])
        for way in tqdm(ways_for(subject), desc=f"{subject.name}: solvers", leave=False):
            fewest = 2 if way in SWEEPS else 1
            for passes in range(fewest, most + 1):
                output = subject.run(way.solver(passes, cc.LastPasses(1)))[1]
                error = ((output.logits - exact).norm() / exact.norm()).item()
                yield {
                    "subject": subject.name,
                    "solver": way.name,
                    "passes": passes,
                    "cost": way.guess_passes + passes,
                    "residual": output.solver_report.residuals[-1].item(),
                    "error": error,
                }
                if max(error, output.solver_report.residuals[-1].item()) < min(THRESHOLDS):
                    break


def passes_needed(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each solver, from the rows of `convergence`; empty where they do not go far enough."""
    for subject, solver in dict.fromkeys((row["subject"], row["solver"]) for row in rows):
        mine = [row for row in rows if (row["subject"], row["solver"]) == (subject, solver)]
        found: dict[str, Any] = {"subject": subject, "solver": solver}
        for what in ("residual", "error"):
            for threshold in THRESHOLDS:
                good = [row for row in mine if row[what] < threshold]
                found[f"passes to {what} {threshold:g}"] = good[0]["passes"] if good else None
                found[f"cost to {what} {threshold:g}"] = good[0]["cost"] if good else None
        yield found


def gradients(subject: Subject, passes: Sequence[int], most: int) -> Iterator[dict[str, Any]]:
    full_loss, full = subject.gradient(cc.Sequential())
    cases = [
        (way, count, rule)
        for way in ways_for(subject)
        for count in passes
        for rule in RULES
        if rule.num_passes <= count and way.guess_passes + count + backward_cost(rule) <= most
        if way not in SWEEPS or (count > 1 and rule.num_passes == 1)
    ]
    cases += [(JACOBIS[0], *PUBLISHED)] if (JACOBIS[0], *PUBLISHED) not in cases else []
    for way, count, rule in tqdm(cases, desc=f"{subject.name}: gradients", leave=False):
        loss, found = subject.gradient(way.solver(count, rule))
        cost = way.guess_passes + count + backward_cost(rule)
        yield {
            "subject": subject.name,
            "solver": way.name,
            "passes": count,
            "rule": repr(rule).replace(", tolerance=None", "").replace("iterations=", "").replace("passes=", ""),
            "cost": cost,
            "step_ratio": round(step_ratio(cost), 3),
            "cosine": torch.cosine_similarity(found, full, dim=0).item(),
            "norm_ratio": (found.norm() / full.norm()).item(),
            "loss_error": abs(loss - full_loss),
        }


# The subjects.


def train(
    model: Any, batches: Iterator[tuple[Tensor, Tensor]], steps: int, recurrent_rate: float, name: str
) -> list[float]:
    recurrent = {id(p) for n, p in model.named_parameters() if n.startswith(("fusion.", "carry."))}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in recurrent], "lr": 2e-3},
        {"params": [p for p in model.parameters() if id(p) in recurrent], "lr": 2e-3 * recurrent_rate},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
    )
    losses = []
    model.train()
    for _ in tqdm(range(steps), desc=f"training {name}", leave=False):
        ids, targets = next(batches)
        loss = F.cross_entropy(model(ids, use_cache=False).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def small_t2mlr(vocab_size: int, hidden_size: int, num_layers: int, layer_start: int, layer_end: int) -> Any:
    torch.manual_seed(1)
    base = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return cc.T2MLRForCausalLM(
        cc.T2MLRConfig(base_config=base, layer_start=layer_start, layer_end=layer_end, solver=TRAINED_BY)
    )


def gates(model: Any) -> dict[str, float]:
    return {name: round(getattr(model.fusion, f"{name}_scale").tanh().item(), 4) for name in ("current", "recurrent")}


def of_task(
    name: str, lengths: Sequence[int], steps: int, batch: int, prefixes: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    examples = TrainingExamples(get_task(name), tuple(lengths), 1, batch, batch, steps, prefixes)
    for step in range(steps):
        made = examples.batch(range(step * batch, (step + 1) * batch))
        yield made["input_ids"], made["labels"]


def parity(options: argparse.Namespace) -> Subject:
    task = get_task("parity")
    model = small_t2mlr(len(task.vocabulary), 64, 4, 1, 3)
    losses = train(model, of_task("parity", range(3, 41), options.steps, 32, True), options.steps, 1.0, "parity")
    batch = held_out(task, "test", 40, 16, 3, True)[0]
    facts = {"last losses": round(sum(losses[-20:]) / 20, 4), "gates": gates(model)}
    return Subject("T2MLR, parity", model, batch["input_ids"], batch["labels"], facts)


def bytes_of(path: Path) -> Tensor:
    with path.open(encoding="utf-8") as lines:
        text = "\n".join(json.loads(line)["text"] for line in lines)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def windows(data: Tensor, steps: int, batch: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - width - 1, (batch,), generator=generator)
        rows = torch.stack([data[start : start + width + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]


def text(options: argparse.Namespace) -> Subject:
    data = bytes_of(options.text)
    model = small_t2mlr(256, 128, 10, 4, 6)
    losses = train(model, windows(data[: -len(data) // 10], options.steps, 8, 128), options.steps, 10.0, "text")
    ids, targets = next(windows(data[-len(data) // 10 :], 1, 4, 128))
    facts = {"last losses": round(sum(losses[-20:]) / 20, 4), "gates": gates(model)}
    return Subject("T2MLR, text", model, ids, targets, facts)


def smollm2(options: argparse.Namespace, current: float, recurrent: float, name: str) -> Subject:
    from crosscurrent.models.base import load_tokenizer

    base, tokenizer = cc.load_base("smollm2-135m"), load_tokenizer("smollm2-135m")
    model: Any = cc.retrofit(base, layer_start=12, layer_end=18)
    torch.manual_seed(1)
    with torch.no_grad():
        model._init_weights(model.fusion)
        model.fusion.current_scale.fill_(current)
        model.fusion.recurrent_scale.fill_(recurrent)
    model.eval().requires_grad_(False)
    for weight in measured_weights(model):
        weight.requires_grad_()
    with options.gsm8k.open(encoding="utf-8") as lines:
        problems = [json.loads(next(lines)) for _ in range(8)]
    texts = [f"{problem['question']}\n{problem['answer']}" for problem in problems]
    rows = [tokenizer(each).input_ids for each in texts]
    rows = sorted((row for row in rows if len(row) > 128), key=len)[:1]
    batch = torch.tensor([row[:129] for row in rows])
    return Subject(name, model, batch[:, :-1], batch[:, 1:], {"gates": gates(model)})


def rlt(options: argparse.Namespace, scale: float) -> Subject:
    task = get_task("s5_swaps")
    torch.manual_seed(1)
    config = cc.RLTConfig(
        vocab_size=len(task.vocabulary),
        hidden_size=64,
        intermediate_size=168,
        num_attention_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        feedback_scale=scale,
    )
    model = cc.RLTForCausalLM(config)
    name = f"RLT-1, feedback scale {scale:g}"
    losses = train(model, of_task("s5_swaps", range(2, 25), options.steps, 32, True), options.steps, 1.0, name)
    batch = held_out(task, "test", 32, 16, 3, True)[0]
    return Subject(name, model, batch["input_ids"], batch["labels"], {"last losses": round(sum(losses[-20:]) / 20, 4)})


SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {
    "parity": parity,
    "text": text,
    "smollm2-small": lambda options: smollm2(options, 0.1, 0.1, "SmolLM2-135M, gates 0.1"),
    "smollm2-open": lambda options: smollm2(options, 0.5, 1.0, "SmolLM2-135M, gates 0.5 and 1"),
    "rlt-0.1": lambda options: rlt(options, 0.1),
    "rlt-1": lambda options: rlt(options, 1.0),
}


# Files.


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def read_csv(path: Path) -> list[dict[str, Any]]:
    def value(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{key: value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def draw(output: Path, rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    from crosscurrent.experiments.drawing import COLOURS, plt, save_figure

    names = list(dict.fromkeys(row["subject"] for row in rows))
    figure, axes = plt.subplots(2, len(names), figsize=(4.2 * len(names), 7.4), squeeze=False, layout="constrained")
    solvers = [way.name for way in (*JACOBIS, *SWEEPS)]
    for column, name in enumerate(names):
        top, bottom = axes[0][column], axes[1][column]
        for colour, solver in zip(COLOURS, solvers, strict=False):
            curve = [row for row in rows if (row["subject"], row["solver"]) == (name, solver)]
            if curve:
                top.plot([r["cost"] for r in curve], [max(r["error"], 1e-8) for r in curve], color=colour, label=solver)
            points = [row for row in found if (row["subject"], row["solver"]) == (name, solver)]
            for mark, kind in (("o", "LastPasses"), ("+", "Implicit")):
                chosen = [row for row in points if row["rule"].startswith(kind)]
                bottom.plot(
                    [r["step_ratio"] for r in chosen],
                    [max(1 - r["cosine"], 1e-7) for r in chosen],
                    mark,
                    color=colour,
                    alpha=0.7,
                )
        top.set(yscale="log", title=name, xlabel="forward passes of the range, guess included")
        bottom.set(yscale="log", xlabel=f"training step / base at {RANGE_SHARE:.0%} of the layers, counted")
        bottom.axhline(0.01, color="grey", linewidth=0.8)
        bottom.axvline(1.3, color="grey", linewidth=0.8)
    axes[0][0].set(ylabel="relative error of the logits")
    axes[1][0].set(ylabel="1 - cosine to the full gradient (o last passes, + implicit)")
    axes[0][0].legend(fontsize=7)
    save_figure(figure, output / "convergence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="subjects, default all")
    parser.add_argument("--text", type=Path, help="JSON lines with a field 'text', for the subject 'text'")
    parser.add_argument("--gsm8k", type=Path, help="gsm8k_train.jsonl, for the subjects 'smollm2-...'")
    parser.add_argument("--steps", type=int, default=400, help="of training, for the models that are trained here")
    parser.add_argument("--most-passes", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    for subject_name, argument in (("text", options.text), *((n, options.gsm8k) for n in SUBJECTS if "smollm2" in n)):
        if subject_name in options.only and argument is None:
            parser.error(
                f"the subject {subject_name!r} needs a path: give --{'text' if subject_name == 'text' else 'gsm8k'}."
            )
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    names = ("convergence.csv", "passes.csv", "gradients.csv")
    rows, needed, found = (read_csv(options.output / name) for name in names)
    facts_path = options.output / "facts.json"
    facts: dict[str, Any] = json.loads(facts_path.read_text()) if facts_path.exists() else {}
    for name in options.only:
        started = time.perf_counter()
        subject = SUBJECTS[name](options)
        big = name.startswith("smollm2")
        new_rows = list(convergence(subject, 6 if big else options.most_passes))
        grid, most = ((1, 2, 3), 8) if big else ((1, 2, 3, 4, 8), 13) if name == "text" else ((1, 2, 3, 4, 8, 16), 25)
        new_found = list(gradients(subject, grid, most))
        # A subject that was measured before is measured anew; the others' rows stay.
        rows = [row for row in rows if row["subject"] != subject.name] + new_rows
        needed = [row for row in needed if row["subject"] != subject.name] + list(passes_needed(new_rows))
        found = [row for row in found if row["subject"] != subject.name] + new_found
        size = {"batch": list(subject.ids.shape), "seconds": round(time.perf_counter() - started)}
        facts[subject.name] = subject.facts | size
        facts["versions"] = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "crosscurrent": cc.__version__,
        }
        for file, content in zip(names, (rows, needed, found), strict=True):
            write_csv(options.output / file, content)
        facts_path.write_text(json.dumps(facts, indent=2) + "\n")
        print(subject.name, json.dumps(facts[subject.name]))
    draw(options.output, rows, found)


if __name__ == "__main__":
    main()

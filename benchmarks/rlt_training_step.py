"""How much longer a training step of RLT-1 and RLT-2 takes than one of RLT-0, at the published size, in one run.

    python benchmarks/rlt_training_step.py [--repeats 7] [--threads 2] [--autocast] [--json]

4+4 layers, width 512, microbatch 32, 40 tokens: forward and backward, without the optimizer. The models take turns, so
that what else the machine does meets all of them; medians, and their ratios to RLT-0. Seconds are for this machine.
"""

import argparse
import json
import statistics
import time

import torch
from tqdm import tqdm

import crosscurrent as cc

INTERVALS = {"RLT-0": None, "RLT-2 (4)": 4, "RLT-1": 1}


def make(feedback_interval: int | None) -> cc.RLTForCausalLM:
    torch.manual_seed(42)
    return cc.RLTForCausalLM(cc.RLTConfig(vocab_size=277, feedback_interval=feedback_interval)).train()


def seconds(model: cc.RLTForCausalLM, ids: torch.Tensor, autocast: bool) -> float:
    started = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids, labels=ids, solver=cc.Sequential()).loss
    loss.backward()
    model.zero_grad()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast in place of float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ids = torch.randint(0, 277, (32, 40), generator=torch.Generator().manual_seed(1))
    models = {name: make(interval) for name, interval in INTERVALS.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat in tqdm(range(options.repeats + 1), desc="measuring", unit="round", leave=False):
        for name, model in models.items():
            taken = seconds(model, ids, options.autocast)
            if repeat > 0:  # the first one warms up
                times[name].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    rows = {name: {"seconds": median, "ratio": median / medians["RLT-0"]} for name, median in medians.items()}
    if options.json:
        facts = {"torch": torch.__version__, "threads": options.threads, "autocast": options.autocast, "rows": rows}
        print(json.dumps(facts, indent=2))
        return
    for name, row in rows.items():
        print(f"{name:<10}{row['seconds']:>9.3f} s{row['ratio']:>7.2f} x RLT-0")


if __name__ == "__main__":
    main()

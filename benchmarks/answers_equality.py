"""Are answers scored by this library those of the model's own `generate`, called plainly?

The problems are put to an untouched model twice: one by one, by its chat template and `generate(do_sample=False)`, and in
padded batches by `answer_problems`; and once more to a fresh retrofit of it. Outputs and verdicts are compared.

    python benchmarks/answers_equality.py gsm8k --data FOLDER --count 16 --max-new-tokens 256
    python benchmarks/answers_equality.py math500 --data FOLDER --count 8 --max-new-tokens 256
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import crosscurrent as cc
from crosscurrent.evaluation.answering import AnsweringSettings, answer_problems, summary
from crosscurrent.tasks.reasoning import Problem, ReasoningTask, get_reasoning_task


@torch.no_grad()
def by_generate(
    model: Any, tokenizer: Any, task: ReasoningTask, problem: Problem, max_new_tokens: int
) -> tuple[str, Any]:
    """The output, as anybody would get it with transformers alone, and its verdict."""
    messages = [{"role": "user", "content": task.message(problem)}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    output = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return output, task.judge(problem, output)


def main() -> None:
    """Compare, and print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="gsm8k or math500, or another one that is asked as a chat")
    parser.add_argument("--data", type=Path, help="a folder with the task's files; default: the hub")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--model", default="smollm2-135m")
    asked = parser.parse_args()
    base, tokenizer = cc.load_base(asked.model, dtype=torch.float32), cc.load_tokenizer(asked.model)
    task = get_reasoning_task(asked.task)
    problems = task.problems("test", asked.data, asked.count)
    progress = tqdm(problems, desc="by generate", unit="problem", leave=False)
    expected = [by_generate(base, tokenizer, task, problem, asked.max_new_tokens) for problem in progress]
    settings = AnsweringSettings(batch_size=asked.batch_size, max_new_tokens=asked.max_new_tokens)
    layers = base.config.num_hidden_layers
    for name, model in (("untouched", base), ("fresh retrofit", cc.retrofit(base, 2 * layers // 5, 3 * layers // 5))):
        records = answer_problems(model, tokenizer, task, problems, settings, name=name)
        pairs = list(zip(records, expected, strict=True))
        found = summary(records)
        facts = {
            "task": asked.task,
            "model": name,
            "problems": len(records),
            "equal_outputs": sum(record.output == output for record, (output, _) in pairs),
            "equal_verdicts": sum((one.parsed, one.scores) == (v.parsed, v.scores) for one, (_, v) in pairs),
            "scores": {metric: value["mean"] for metric, value in found["metrics"].items()},
            "cut_off": found["truncation_rate"],
            "no_answer": found["parse_failure_rate"],
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()

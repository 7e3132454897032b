"""Does lm-evaluation-harness's own Hugging Face model give on a base what `crosscurrent evaluate` gave on its retrofit?

    python benchmarks/zero_shot_equality.py retrofitted-scores --data FOLDER --base smollm2-135m --output base-scores

reads the folder that `crosscurrent evaluate --output` wrote of a fresh retrofit, scores the untouched base on the same
examples with the harness's `HFLM`, writes that evaluation, and compares every score and every log-likelihood to the last
digit.
"""

import argparse
import json
import sys
from pathlib import Path

from lm_eval.models.huggingface import HFLM

from crosscurrent.evaluation.zero_shot import load_tasks
from crosscurrent.experiments.zero_shot import SCORES, refuse_used_folder, run_zero_shot, write_evaluation
from crosscurrent.models.base import load_base, load_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluated", type=Path, help="what `crosscurrent evaluate --output` wrote of the retrofit")
    parser.add_argument("--data", type=Path, required=True, help="the folder of local files that it was given")
    parser.add_argument("--base", default="smollm2-135m", help="the base that was retrofitted")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the base's scores")
    arguments = parser.parse_args()
    refuse_used_folder(arguments.output)
    facts = json.loads((arguments.evaluated / SCORES).read_text())
    lm = HFLM(load_base(arguments.base), tokenizer=load_tokenizer(arguments.base), batch_size=facts["batch_size"])
    tasks = load_tasks(list(facts["tasks"]), arguments.data)
    found = run_zero_shot(arguments.base, lm, tasks, arguments.data, facts["limit"])
    write_evaluation(found, arguments.output)
    differing = 0
    for task, scores in facts["tasks"].items():
        folders = (arguments.evaluated, arguments.output)
        records, expected = ((folder / f"{task}.jsonl").read_text().splitlines() for folder in folders)
        different = sum(ours != theirs for ours, theirs in zip(records, expected, strict=True))
        same_scores = scores == found.facts["tasks"][task]
        differing += different + (not same_scores)
        print(f"{task}: {len(records)} examples, {different} differ; scores {'equal' if same_scores else 'differ'}")
    print("equal to the last digit" if differing == 0 else "NOT equal")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())

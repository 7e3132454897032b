#!/usr/bin/env bash
# All benchmarks on one GPU, in at most 10 minutes.
#
#     benchmarks/gpu.sh [FOLDER]        FOLDER: for tables and JSON; default $OUT, else ./gpu-results
#
# DEVICE=cpu SIZE=tiny benchmarks/gpu.sh shows without a GPU that it works. PYTHON names the interpreter.
# Each part has its own time limit. One that fails or runs out of time does not stop the others; it is named at the
# end, and the exit code is 1.
set -uo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-${OUT:-gpu-results}}"
device="${DEVICE:-cuda}"
size="${SIZE:-large}"
python="${PYTHON:-python}"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder"
failed=()

# part NAME SECONDS ARGUMENTS...: one call of `crosscurrent bench`, into NAME.md, NAME.json and NAME.log.
part() {
    local name="$1" seconds="$2"
    shift 2
    echo "== $name (at most $seconds s): crosscurrent bench $*"
    if timeout --kill-after=5 "$seconds" "$python" -m crosscurrent bench "$@" --device "$device" --size "$size" \
        --markdown --output "$folder/$name.json" >"$folder/$name.md" 2>"$folder/$name.log"; then
        cat "$folder/$name.md"
    else
        echo "   failed or out of time (exit code $?); the end of $name.log:"
        tr '\r' '\n' <"$folder/$name.log" | grep -v '^ *$' | tail -n 3
        failed+=("$name")
    fi
}

{ nvidia-smi 2>/dev/null || echo "no nvidia-smi"; } >"$folder/machine.txt"

# The limits add up to 590 seconds. Peak memory, a process for each subject, is measured in float32 only.
part rlt-step-fp32 80 rlt-step --repeats 5
part rlt-step-bf16 40 rlt-step --repeats 5 --dtype bfloat16-autocast --no-memory
part rlt-peer-step 75 rlt-peer-step --repeats 3
part rlt-decode 60 rlt-decode --repeats 2
part rlt-prefill 75 rlt-prefill --repeats 2
part t2mlr-step-fp32 100 t2mlr-step --repeats 4
part t2mlr-step-bf16 40 t2mlr-step --repeats 4 --dtype bfloat16-autocast --no-memory
part t2mlr-decode 50 t2mlr-decode --repeats 7
part t2mlr-prefill 25 t2mlr-prefill --repeats 4
part fusion-fp32 25 fusion
part fusion-bf16 20 fusion --dtype bfloat16-autocast

if [ "${#failed[@]}" -gt 0 ]; then
    echo "Not measured: ${failed[*]}. The rest is in $folder."
    exit 1
fi
echo "Written: $folder"

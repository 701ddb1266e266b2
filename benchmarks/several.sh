#!/bin/bash
# Measures a machine with four or eight GPUs: bash benchmarks/several.sh FOLDER PART...
#
# Each PART below takes minutes, and writes its results to FOLDER as soon as it has them: reports of `rptrain bench`, with
# the commit. GPUs are limited to 24 GiB. A part that fails does not end the others.

out=$1
shift
mkdir -p "$out"
python=${PYTHON:-python3}
run="--config benchmarks/qwen3-1.7b.toml engine.replan=false"
one="engine.devices=cuda:0"
two="engine.devices=cuda:0,1"
four="engine.devices=cuda:0,1,2,3"
eight="engine.devices=cuda:0,1,2,3,4,5,6,7"

# compare NAME TURNS SETTING...: the settings in turn
compare() {
    $python -m benchmarks.compare --out "$out/$1.json" --turns "$2" "${@:3}"
}

# same_losses NAME: whether all runs in NAME.json have the same losses, to the bit
same_losses() {
    $python - "$out/$1.json" <<'END'
import json
import sys

losses = [run["throughput"]["losses"] for run in json.load(open(sys.argv[1]))["runs"]]
print("losses:", *losses, "equal" if all(each == losses[0] for each in losses) else "NOT EQUAL")
END
}

# scaling NAME TURNS SETTING SEQUENCES GPUS REPLICAS: one GPU, and several with as many sequences each
scaling() {
    compare "$1" "$2" "$run $3 $one engine.replicas=1 train.global_batch_size=$4 --steps 6" \
        "$run $3 $5 engine.replicas=$6 train.global_batch_size=$(($4 * $6)) --steps 6"
}

for part in "$@"; do
    echo "== $part $(date +%T)"
    case $part in
    # ---- four GPUs
    losses) # of one and of four GPUs, with equal replicas
        equal="$run train.global_batch_size=256 engine.replicas=4 --warmup 1 --steps 2"
        compare losses-4gpu 1 "$equal $one" "$equal $four" && same_losses losses-4gpu
        ;;
    qwen3-1.7b) scaling qwen3-1.7b-4gpu 2 "" 64 "$four" 4 ;;
    qwen3-1.7b-fp8) scaling qwen3-1.7b-fp8-4gpu 1 engine.fp8=true 64 "$four" 4 ;;
    qwen3-1.7b-sync) scaling qwen3-1.7b-sync-4gpu 1 optim.update=sync 64 "$four" 4 ;;
    llama-3.1-8b) scaling llama-3.1-8b-4gpu 1 model.path=llama-3.1-8b 32 "$four" 4 ;;
    qwen3-32b) # in full, planned again with measured times: 15 steps, or 32 if the plan changes
        compare qwen3-32b-4gpu 1 "--config benchmarks/qwen3-1.7b.toml $four model.path=qwen3-32b optim.moments=int8 \
            train.global_batch_size=40 --warmup 2 --steps 3"
        ;;
    qwen3-235b) # LoRA on a base in bfloat16, of 438 GiB
        compare qwen3-235b-lora-4gpu 1 "$run $four model.path=qwen3-235b-a22b train.method=lora lora.r=32 \
            train.global_batch_size=48 --warmup 1 --steps 2"
        ;;
    qwen3-235b-nf4)
        compare qwen3-235b-lora-nf4-4gpu 1 "$run $four model.path=qwen3-235b-a22b train.method=lora lora.r=32 \
            lora.base=nf4 --warmup 1 --steps 4"
        ;;
    tests) # ten minutes on one GPU
        $python -m pytest -q -m "gpu or multigpu" -p no:cacheprovider tests 2>&1 | tee "$out/tests.txt" | tail -8
        ;;
    # ---- eight GPUs
    qwen3-1.7b-8) scaling qwen3-1.7b-8gpu 2 "" 64 "$eight" 8 ;;
    qwen3-1.7b-8-sync) scaling qwen3-1.7b-sync-8gpu 1 optim.update=sync 64 "$eight" 8 ;;
    llama-3.1-8b-8) scaling llama-3.1-8b-8gpu 1 model.path=llama-3.1-8b 32 "$eight" 8 ;;
    qwen3-1.7b-4-2)
        compare qwen3-1.7b-4-2gpu 1 "$run $four engine.replicas=4 train.global_batch_size=256 --steps 6" \
            "$run $two engine.replicas=2 train.global_batch_size=128 --steps 6"
        ;;
    llama-3.1-8b-4-2)
        compare llama-3.1-8b-4-2gpu 1 "$run $four model.path=llama-3.1-8b engine.replicas=4 train.global_batch_size=128 \
            --steps 4" "$run $two model.path=llama-3.1-8b engine.replicas=2 train.global_batch_size=64 --steps 4"
        ;;
    *) echo "no part is named $part" ;;
    esac
done
date +%T

#!/usr/bin/env bash
# The measurements that a change to kernels or to the tuner needs on one GPU, in parts of under ten minutes each.
#
#   benchmarks/gpu_day.sh programs|kernels|grouped|guesses|more [SECONDS [FOLDER]]
#
# Prints as it goes. A run that is over its time is ended and the others go on; the last lines say how each ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

part=${1-}
limit=${2-540}
folder=${3-/tmp}
ended=""

run() {
    local most=$1 left=$((limit - SECONDS))
    shift
    if ((left < 20)); then
        ended+=$'\n'"not begun: $*"
        return
    fi
    echo "==== $*"
    local start=$SECONDS
    timeout --kill-after=10 "$((most < left ? most : left))" python "$@"
    ended+=$'\n'"$? after $((SECONDS - start)) s: $*"
}

case $part in
    programs)
        run 150 benchmarks/program_gpu.py --only experts --budget 60 --rounds 8 --processors
        run 220 benchmarks/program_gpu.py --only dense --budget 60 --rounds 8 --repeat-tuning
        run 140 benchmarks/program_gpu.py --only moe --budget 60 --rounds 8
        ;;
    kernels)
        run 150 benchmarks/products_gpu.py --seconds 130
        run 130 benchmarks/passes_gpu.py cross_entropy --only 6 3 --seconds 110 --kernels 12
        run 80 benchmarks/passes_gpu.py norms --only 6 7 --seconds 60
        run 120 benchmarks/ragged_gpu.py --only 3 2 5
        ;;
    grouped)
        run 170 benchmarks/moe_gpu.py --only gathered --kernels 8 --seconds 150
        run 100 benchmarks/ragged_gpu.py --tables
        run 100 -m pytest -q -m gpu tests/library/test_mosaic_gathered.py tests/library/test_mosaic_streams.py
        run 120 benchmarks/ragged_gpu.py --only 13 18
        run 80 benchmarks/moe_gpu.py --kernels 8 --seconds 60
        ;;
    guesses)
        for name in attention ragged_dot linear_cross_entropy layer_norm; do
            run 120 benchmarks/unseen_collect.py --seed 2 --only "$name" --seconds 100 --out "$folder/unseen_$name.jsonl"
        done
        ;;
    more)
        run 190 benchmarks/program_gpu.py --only dense --budget 60 --rounds 8 --median-heuristics
        run 130 benchmarks/program_gpu.py --only dense --budget 15 30 --rounds 6
        run 130 benchmarks/program_gpu.py --only vit --budget 60 --rounds 8
        run 80 benchmarks/program_gpu.py --only decode --budget 60 --rounds 8
        ;;
    *)
        sed -n '2,6p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
echo "==== exit codes$ended"

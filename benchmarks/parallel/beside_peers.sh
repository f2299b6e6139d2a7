#!/usr/bin/env bash
# vLLM and SGLang on two cards beside specengine, in one lease: 8B and Qwen3-30B-A3B shapes, plain and EAGLE-3.
#
#   VLLM=/path/to/python SGLANG=/path/to/python OUT=out benchmarks/parallel/beside_peers.sh
#
# VLLM, SGLANG: interpreters of environments that have them; one that is not given is left out. Some 12 minutes.
set -u
cd "$(dirname "$0")/../.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
OUT=${OUT:-.}
peer() {  # interpreter, script, label
  [ -n "$1" ] || { echo "$3 is left out"; return; }
  for model in llama-3.1-8b-shape qwen3-30b-a3b-shape; do
    for spec in "" "--algorithm EAGLE3 --random-draft 32000"; do
      file="$OUT/$3-$model${spec:+-eagle3}.json"
      "$1" "benchmarks/peers/$2" --model "$model" --tp-size 2 --new-tokens 128 $spec --json "$file"
    done
  done
}
python benchmarks/parallel/two_cards.py --symm-mem --parts speed speed30 --out "$OUT/specengine.json"
peer "${VLLM:-}" vllm_throughput.py vllm
peer "${SGLANG:-}" sglang_throughput.py sglang

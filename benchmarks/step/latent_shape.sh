#!/usr/bin/env bash
# Latent attention on a GPU, checks first, then kernels, then the whole engine on random weights.
#   benchmarks/step/latent_shape.sh OUT
# Each part has its own time limit and its own file in OUT; one that fails does not stop the others.
set -u
out=${1:?a folder for results}
mkdir -p "$out"
part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2; shift 2
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1; echo "$name: $?" | tee -a "$out/parts.txt"
}
part tests 200 python -m pytest -q -n 0 tests/kernels/test_latent_attention.py \
  tests/runner/test_attention_triton.py tests/layers/test_latent_layers.py
part kernels 200 python benchmarks/kernels/latent.py --json "$out/latent.json"
shape="--load-format dummy --context-length 4096 --batch-sizes 1 8 64"
part plain 300 python -m specengine bench step deepseek-v2-lite-shape $shape --json "$out/plain.json"
part mtp 300 python -m specengine bench step deepseek-v2-lite-shape $shape --json "$out/mtp.json" \
  --speculative-algorithm MTP --speculative-num-steps 2 --speculative-simulate-accept-length 2.0

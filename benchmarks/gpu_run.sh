#!/usr/bin/env bash
# One part of what is to be run on a GPU, in at most ten minutes: benchmarks or tests (gpu_parts.py).
#
#     bash benchmarks/gpu_run.sh PART [RESULTS] [CARRIED]
#
# Shapes are those of Llama-3-8B, Qwen3-8B and OPT-6.7b, in this order. A part answers:
#   1  Where does a step's time go? Profiles, what the host does between launches, matrix products by number of tokens.
#   2  How fast is it beside what one would use instead, at 8 rows and at 1? Hugging Face with a compiled static cache and
#      with a dynamic one, a loop in plain PyTorch that is compiled and recorded, and emssd.
#   3  What do padding and a lack of graphs cost? Decoding with each; then part 2's comparison at 16, 24, 2 and 4 rows.
#   4  Is it right? The tests of tests/gpu, the demo's model with a head, compute-sanitizer on a tiny model.
#   5  How far is a step from its floor? Verification steps, recorded with Inductor and without, and eager.
#
# RESULTS (gpu-results) gets what is found out, piece by piece. A call that finds results there, or in CARRIED/results,
# goes on after them. EMSSD_PART_SECONDS (570) is what a part may take: with 390, two fit into a quarter of an hour.
# CARRIED (carried, where it is there) is a folder by gpu_bundle.py, for machines without network. Needs torch with CUDA,
# transformers, pytest, hypothesis, rich, ninja, a C++ compiler and nvcc. What is installed or compiled stays in EMSSD_WORK
# (a folder under /tmp) for the next part. EMSSD_DRY_RUN=1 runs a tiny model on the CPU, where the tests skip.
set -uo pipefail
start=$SECONDS
usage="usage: gpu_run.sh PART [RESULTS] [CARRIED]"
part=${1:?$usage}
[[ $part =~ ^[1-5]$ ]] || { echo "$usage; PART is 1 to 5, not $part" >&2; exit 2; }
results=$(mkdir -p "${2:-gpu-results}" && cd "${2:-gpu-results}" && pwd)
carried=${3:+$(cd "$3" && pwd)}
cd "$(dirname "$0")/.."
[ -z "$carried" ] && [ -d carried ] && carried=$PWD/carried
[ -n "$carried" ] && [ -d "$carried/results" ] && cp -n "$carried"/results/* "$results"
exec > >(tee -a "$results/part$part.log") 2>&1

python=${PYTHON:-python3}
work=${EMSSD_WORK:-${TMPDIR:-/tmp}/emssd-gpu}
site=$work/site
export EMSSD_KERNELS=${EMSSD_KERNELS:-$work/kernels} EMSSD_CACHE=${EMSSD_CACHE:-$work/cache}
mkdir -p -m 700 "$work" "$site" "$EMSSD_KERNELS" "$EMSSD_CACHE"

wheels=$([ -n "$carried" ] && cd "$carried" && ls -- *.whl 2>/dev/null)
if [ -n "$wheels" ] && [ "$wheels" != "$(cat "$site/.wheels" 2>/dev/null)" ]; then
    (cd "$carried" && timeout 100 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$site" ./*.whl) || exit 1
    printf '%s\n' "$wheels" >"$site/.wheels"
fi
[ -n "$carried" ] && [ -d "$carried/kernels" ] && cp -r "$carried/kernels/." "$EMSSD_KERNELS"
# The checkout itself is used, not a wheel of it; its plugins are found by these entry points.
"$python" - "$site" <<'PY' || exit 1
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
info = pathlib.Path(sys.argv[1]) / f"{project['name']}-{project['version']}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = []
for group, points in project["entry-points"].items():  # pytest's too, which registers the markers of the suites
    lines += [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
(info / "entry_points.txt").write_text("\n".join(lines) + "\n")
PY

plugins=$(printf '%s:' "$PWD"/plugins/*)
export PATH=$PATH:$("$python" -c 'import pathlib, sys; print(pathlib.Path(sys.executable).parent)') # for ninja
export PYTHONPATH=$PWD:$plugins$site${PYTHONPATH:+:$PYTHONPATH}
found=$("$python" benchmarks/cuda_toolkit.py "$work/links") && eval "$found"
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$work}
export MAX_JOBS=${MAX_JOBS:-$(nproc)} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

date -u +%FT%TZ
export EMSSD_COMMIT=$(git rev-parse HEAD 2>/dev/null || cat "$carried/COMMIT")
echo "commit $EMSSD_COMMIT"
timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
"${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version | tail -2
timeout 150 "$python" - <<'PY' || [ -n "${EMSSD_DRY_RUN:-}" ] || exit 1
import sys, emssd_flashinfer

if found := emssd_flashinfer.unavailable():
    sys.exit(found)  # all tests would be skipped, which must not look like success
import flashinfer

print("flashinfer", flashinfer.__version__)
PY

seconds=$("$python" -c "import sys; sys.path.insert(0, 'benchmarks'); import gpu_parts; print(gpu_parts.PART_SECONDS)")
"$python" benchmarks/gpu_parts.py "$part" "$results" $((seconds - (SECONDS - start)))

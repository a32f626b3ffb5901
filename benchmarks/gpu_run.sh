#!/usr/bin/env bash
# One part of what is to be run on a GPU, in at most ten minutes: tests, profiles or benchmarks (gpu_parts.py).
#
#     benchmarks/gpu_run.sh PART RESULTS [CARRIED]
#
#   1  the tests of tests/gpu, the demo's model with a head, compute-sanitizer on a tiny model
#   2  verification steps of OPT-6.7b, Llama-3-8B and Qwen3-8B, recorded, eager and unfused; profiles of two steps of OPT-6.7b
#   3  decoding at batch 8, 2, 4, 16, 24: recorded, eager, padded, Hugging Face with a dynamic and a static cache
#
# RESULTS gets everything that is found out; what was measured there already is not measured again. CARRIED is a folder
# with wheels that the machine's Python lacks, for machines without network, and maybe kernels/ from
# `compile_flashinfer.py --prebuild`. Needs torch with CUDA, transformers, pytest, hypothesis, rich, ninja, a C++
# compiler and nvcc. EMSSD_PART_SECONDS (570) is what a part may take. What is installed or compiled stays in EMSSD_WORK (a folder under /tmp) for the next part.
# EMSSD_DRY_RUN=1 runs a tiny model on the CPU, where the tests skip, to see that all of this works.
set -uo pipefail
start=$SECONDS
usage="usage: gpu_run.sh PART RESULTS [CARRIED]"
part=${1:?$usage}
[[ $part =~ ^[1-3]$ ]] || { echo "$usage; PART is 1 to 3, not $part" >&2; exit 2; }
results=$(mkdir -p "${2:?$usage}" && cd "$2" && pwd)
carried=${3:+$(cd "$3" && pwd)}
cd "$(dirname "$0")/.."
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
cat COMMIT 2>/dev/null || git rev-parse HEAD
timeout 10 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
"${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version | tail -2
timeout 150 "$python" - <<'PY' || [ -n "${EMSSD_DRY_RUN:-}" ] || exit 1
import platform, sys, torch, transformers, emssd_flashinfer

print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
if found := emssd_flashinfer.unavailable():
    sys.exit(found)  # all tests would be skipped, which must not look like success
import flashinfer

print("flashinfer", flashinfer.__version__)
PY

seconds=$("$python" -c "import sys; sys.path.insert(0, 'benchmarks'); import gpu_parts; print(gpu_parts.PART_SECONDS)")
"$python" benchmarks/gpu_parts.py "$part" "$results" $((seconds - (SECONDS - start)))

#!/usr/bin/env bash
# The GPU tests, then the quick benchmark, in one command of at most twelve and a half minutes.
#
#     benchmarks/gpu_run.sh RESULTS [WHEELS]
#
# RESULTS gets everything that is found out. WHEELS is a folder with what the machine's Python lacks, for machines without
# network: flashinfer-python, apache-tvm-ffi, hydra-core, omegaconf, antlr4-python3-runtime. Needs torch with CUDA,
# transformers, pytest, hypothesis, rich, ninja, a C++ compiler, and nvcc under CUDA_HOME.
# Installed packages and compiled kernels stay in EMSSD_WORK (a folder under /tmp) for the next time.
# Tests and benchmark have a limit each (seconds): EMSSD_TEST_LIMIT, EMSSD_BENCHMARK_LIMIT. A benchmark that was cut off
# goes on where it stopped when RESULTS is the same. EMSSD_DRY_RUN=1 goes on where there is no GPU, and skips all tests.
set -uo pipefail
results=$(mkdir -p "${1:?usage: gpu_run.sh RESULTS [WHEELS]}" && cd "$1" && pwd)
wheels=${2:+$(cd "$2" && pwd)}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=${EMSSD_WORK:-${TMPDIR:-/tmp}/emssd-gpu}
site=$work/site
mkdir -p "$site"

if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --upgrade --target "$site" "$wheels"/*.whl || exit 1
fi
# The checkout itself is used, not a wheel of it; its plugins are found by these entry points.
"$python" - "$site" <<'PY' || exit 1
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
info = pathlib.Path(sys.argv[1]) / f"{project['name']}-{project['version']}.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
points = "\n".join(f"{name} = {module}" for name, module in project["entry-points"]["emssd"].items())
(info / "entry_points.txt").write_text(f"[emssd]\n{points}\n")
PY

plugins=$(printf '%s:' "$PWD"/plugins/*)
export PYTHONPATH=$PWD:$plugins$site${PYTHONPATH:+:$PYTHONPATH}
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$work}
export MAX_JOBS=${MAX_JOBS:-$(nproc)} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ ! -f "$CUDA_HOME/include/curand_kernel.h" ]; then # fa3 includes it; the wheels of PyTorch bring it
    include=$("$python" -c "import glob, site, sysconfig
found = glob.glob(sysconfig.get_paths()['purelib'] + '/nvidia/*/include/curand_kernel.h')
print(found[0].rsplit('/', 1)[0] if found else '')")
    [ -n "$include" ] && export FLASHINFER_EXTRA_CUDAFLAGS="-I$include"
fi

{
    date -u +%FT%TZ
    git rev-parse HEAD 2>/dev/null
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
    "$CUDA_HOME/bin/nvcc" --version | tail -2
    "$python" -c "import platform, torch, transformers, flashinfer
print('python', platform.python_version(), 'torch', torch.__version__, 'transformers', transformers.__version__,
      'flashinfer', flashinfer.__version__)"
    "$python" -m emssd.authoring
} 2>&1 | tee "$results/machine.txt"

if ! "$python" -c "import sys, emssd_flashinfer as plugin; sys.exit(plugin.unavailable())"; then
    [ -n "${EMSSD_DRY_RUN:-}" ] || exit 1 # all tests would be skipped, which must not look like success
fi

start=$SECONDS
timeout 240 "$python" benchmarks/compile_flashinfer.py --ahead 2>&1 | tee "$results/compile.txt"
echo "kernels: $((SECONDS - start)) s"

start=$SECONDS
timeout "${EMSSD_TEST_LIMIT:-270}" "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider --durations=15 --tb=short \
    --junitxml="$results/tests.xml" 2>&1 | tee "$results/tests.txt"
tested=${PIPESTATUS[0]}
echo "tests: $((SECONDS - start)) s, exit status $tested" | tee -a "$results/tests.txt"

start=$SECONDS
timeout "${EMSSD_BENCHMARK_LIMIT:-240}" "$python" benchmarks/gpu.py --quick --out "$results/gpu.json" \
    ${EMSSD_BENCHMARK_OPTIONS:-} 2>&1 | tee "$results/benchmark.txt"
measured=${PIPESTATUS[0]}
echo "benchmark: $((SECONDS - start)) s, exit status $measured" | tee -a "$results/benchmark.txt"

[ "$tested" -eq 0 ] && [ "$measured" -eq 0 ]

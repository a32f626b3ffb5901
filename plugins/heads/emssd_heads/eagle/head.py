"""`EagleHead`: a decoder layer that reads a token's embedding and a feature of the token before, fused.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077. EAGLE-2
(arXiv 2406.16858) has the same weights, and other trees.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from emssd_heads import LAST_NORMED, Attend, DecoderConfig, Format, HeadFiles, HeadLayer, Loaded, PairedHead, Rotary
from emssd_heads.config import TargetSizes

__all__ = ["load_eagle"]


class EagleHead(PairedHead):
    """An EAGLE-1 or EAGLE-2 head. A feature is the target's last hidden state after its final norm."""

    def __init__(self, config: DecoderConfig, names: Container[str], vocab_size: int) -> None:
        size = config.hidden_size
        super().__init__(size, config.max_len, vocab_size, names)
        self.rotary = Rotary(config)
        self.fc = nn.Linear(2 * size, size, bias="fc.bias" in names)
        # The first layer has no norm before its attention.
        self.layers = nn.ModuleList(HeadLayer(config, i, names, normed=i > 0) for i in range(config.num_layers))

    def forward(self, inputs: torch.Tensor, position_ids: torch.Tensor, attend: Attend) -> torch.Tensor:
        angles = self.rotary(position_ids, inputs.dtype)
        hidden: torch.Tensor = self.fc(inputs)
        first, *later = self.layers
        hidden = first(hidden, angles, attend, hidden)
        for layer in later:
            hidden = layer(hidden, angles, attend)
        return hidden


def load_eagle(path: str, target: TargetSizes) -> Loaded[EagleHead]:
    """Load a head. Whether `fc` has a bias, the file says: configs of heads with and without one leave it out."""
    files = HeadFiles.read(path, target, Format.eagle)
    names, config, decoder = files.names, files.config, DecoderConfig.read(files.config, path)
    files.check_sizes(decoder.hidden_size, config.get("vocab_size"))
    if config.get("bias") and "fc.bias" not in names:
        raise files.cannot("its config.json says that fc has a bias, and fc.bias is missing")
    head = files.filled(lambda: EagleHead(decoder, names, target.vocab_size))
    described = (
        f"EAGLE-1 or EAGLE-2 head, read from {files.checkpoint.source.name}",
        "reads the target's last hidden state, behind its final norm",
        f"fc has {'a' if head.fc.bias is not None else 'no'} bias",
        decoder.described,
        head.described,
    )
    return Loaded(head, (LAST_NORMED,), described)

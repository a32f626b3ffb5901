"""Loads EAGLE-1 and EAGLE-2 heads as their authors publish them."""

from __future__ import annotations

from emssd.drafters import LAST_NORMED, DecoderConfig, Format, HeadFiles, Loaded, TargetSizes
from emssd_eagle.head import EagleHead

__all__ = ["load_eagle"]


def load_eagle(path: str, target: TargetSizes) -> Loaded[EagleHead]:
    """Load a head. Whether `fc` has a bias, the file says: configs of heads with and without one leave it out. Raises
    ConfigError: it is no such head, or none for this target, or not whole; or OutOfMemoryError: the device has no room
    for it.
    """
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
        f"embeddings {'its own' if head.embed_tokens is not None else 'the target’s'}, vocabulary projection the "
        f"target's",
    )
    return Loaded(head, (LAST_NORMED,), described)

"""Options of a plugin, or of a run, as OmegaConf takes them."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

__all__ = ["structured"]


def structured(options: type) -> DictConfig:
    """The dataclass `options` as OmegaConf's structured config; one of them that is a dictionary takes any key. Raises
    OmegaConfBaseException: a field's type or default that cannot be.
    """
    node: DictConfig = OmegaConf.structured(options)
    for _, child in node.items_ex(resolve=False):
        if isinstance(child, DictConfig) and OmegaConf.get_type(child) is dict:
            OmegaConf.set_struct(child, False)
    return node

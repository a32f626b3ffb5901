"""`KangarooRunner`: early layers of the target, an adapter and the target's LM head, run as one model."""

from __future__ import annotations

from emssd.attention import KVUsage, PackedInputs
from emssd.draft_models import DraftCache
from emssd.model import BorrowedTarget, ModelOutput, ModelRunner
from emssd_heads import DecoderConfig, Format, HeadFiles, HeadRunner, LayerHead, Loaded, TargetSizes

__all__ = ["KangarooRunner", "load_adapter"]


class KangarooRunner(DraftCache, ModelRunner):
    """A draft model of two parts, each with a KV cache of its own.

    Args:
        adapter: reads the residual stream after them.
        max_len: tokens of the longest row in the adapter's cache.
    """

    def __init__(
        self, shallow: ModelRunner, num_layers: int, adapter: HeadRunner, max_len: int, target: BorrowedTarget
    ) -> None:
        super().__init__(shallow, adapter)
        self.vocab_size, self.device, self.precision = target.vocab_size, target.device, target.dtype
        self.max_model_len = min(shallow.max_model_len, max_len)
        self._shallow, self._num_layers, self._adapter, self._target = shallow, num_layers, adapter, target
        shallow.take_hidden((num_layers,))

    def run(self, packed: PackedInputs) -> ModelOutput:
        output = self._shallow.run(packed._replace(logit_rows=packed.logit_rows[:0]))  # none of these layers' own
        adapted = self._adapter.run(packed, output.hidden[self._num_layers])
        return ModelOutput(self._target.project(adapted), output.num_padding)

    @property
    def usage(self) -> KVUsage:
        parts = self._shallow.usage, self._adapter.usage
        return KVUsage(*(sum(getattr(part, name) for part in parts) for name in ("held", "peak_held", "peak_pool")))


def load_adapter(path: str, target: TargetSizes, num_layers: int) -> Loaded[LayerHead]:
    """Load an adapter: an attention layer without MLP that reads what `num_layers` of the target's layers give."""
    files = HeadFiles.read(path, target, Format.kangaroo, new_name=lambda name: name.removeprefix("model."))
    decoder = DecoderConfig.read(files.config, path)
    files.check_sizes(decoder.hidden_size, files.config.get("vocab_size"))
    adapter = files.filled(lambda: LayerHead(decoder, files.names, mlp=False))
    described = (
        f"Kangaroo adapter, read from {files.checkpoint.source.name}",
        decoder.described,
        f"reads the residual stream behind {num_layers} layers, as drafter.num_layers says and no file does",
    )
    return Loaded(adapter, (num_layers,), described)

"""`TrainOptions`: the options of a training, for each kind of drafter."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from emssd.errors import ConfigError
from emssd.errors.ranges import AtLeastOne, AtLeastZero, Meta, Positive, check_options

__all__ = ["Eagle3Options", "MedusaOptions", "PardOptions", "TrainOptions"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """A training of one drafter, as far as all kinds have it.

    Attributes:
        kind: of drafter.
        model: the target, by folder or hub id; or ``demo``.
        data: file of JSON lines with prompts.
        output: folder of the drafter.
        field: name of the field of a record that is the prompt.
        template: makes the prompt of several fields, as in ``Question: {question}\\nAnswer:`` (``\\n``: newline).
        limit: use the first so many prompts.
        held_out: so many of the last prompts are not trained on, and acceptance is measured with them.
        max_new_tokens: of the longest continuation of a prompt.
        temperature: of the texts; 0 takes the most probable tokens.
        batch_size: texts that are decoded together.
        learn_prompts: the drafter learns from prompts, too, as if the target had said them.
        epochs: passes over the texts.
        rows: texts of a training step.
        lr: learning rate at its highest.
        seed: of everything that is drawn.
        depth: tokens of a draft that the drafter is trained for, and of drafts where acceptance is measured.
        save_every: training steps between two checkpoints.
        bf16: multiply matrices in bfloat16 while training, for processors that have instructions for it; weights, norms
            and losses stay in float32.
        dtype: of the saved weights; by default the target's.
        model_dtype: of the target, as for `emssd.model.load_model`; float32 is the fastest on many CPUs.
        device: of the target, and of the drafter, which is trained in float32: cpu, cuda, or auto.
        resume: go on with what is in `output`, with the same options.
    """

    kind: ClassVar[str]

    model: str
    data: str
    output: str
    field: str = "prompt"
    template: str | None = None
    limit: AtLeastOne | None = None
    held_out: AtLeastZero = 32
    max_new_tokens: AtLeastOne = 128
    temperature: Annotated[float, Meta(ge=0)] = 0.0
    batch_size: AtLeastOne = 16
    learn_prompts: bool = False
    epochs: AtLeastOne = 10
    rows: AtLeastOne = 4
    lr: Positive = 1e-3
    seed: int = 0
    depth: AtLeastOne = 5
    save_every: AtLeastOne = 200
    bf16: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    model_dtype: str = "auto"
    device: str = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        check_options(self, spelled=_option)

    def decisive(self) -> dict[str, Any]:
        """The options that decide the weights, as JSON: they must stay the same when a training is resumed."""
        values = {name: value for name, value in asdict(self).items() if name not in ("output", "resume", "save_every")}
        listed = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {"kind": self.kind} | values | listed

    def check_same(self, before: dict[str, Any]) -> None:
        """Hold them to those that the training was begun with. Raises ConfigError: one differs."""
        for name, value in self.decisive().items():
            if before.get(name) != value:
                what = "KIND" if name == "kind" else _option(name)
                raise ConfigError(
                    f"{self.output} was begun with {what} {before.get(name)}, and this is {value}; resume it "
                    f"with the same options, or give another --output"
                )


@dataclass(frozen=True, slots=True)
class HeadOptions(TrainOptions):
    """A training of heads on the target's hidden states.

    Attributes:
        num_layers: layers of a head.
        draft_vocab_size: a head drafts so many tokens, those that are most frequent in the texts; by default all, up to
            32768.
    """

    num_layers: AtLeastOne = 1
    draft_vocab_size: AtLeastOne | None = None


@dataclass(frozen=True, slots=True)
class Eagle3Options(HeadOptions):
    """A training of an EAGLE-3 head, saved in a container of speculators.

    Attributes:
        depth: tokens of a draft that the head is trained for: passes of the head over its own outputs.
        hidden_layers: the target's hidden states that the head reads: 0 is what the target's first layer gets, K what
            layer K gives (default: 2, the middle, the last but three; in a shallow target 1, the middle, the last).
        num_layers: decoder layers of the head.
        intermediate_size: width of its MLP; by default the target's.
        num_heads: attention heads; by default as many as the target has.
        num_kv_heads: heads of keys and values; by default all.
        share_lm_head: use the target's vocabulary projection, which is not trained, in the place of an own one.
    """

    kind = "eagle3"

    hidden_layers: tuple[int, ...] | None = None
    intermediate_size: AtLeastOne | None = None
    num_heads: AtLeastOne | None = None
    num_kv_heads: AtLeastOne | None = None
    share_lm_head: bool = False


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadOptions):
    """A training of Medusa heads, saved in the format of vLLM.

    Attributes:
        depth: heads, one for each token of a draft.
        num_layers: residual layers of each head, which has a vocabulary projection of its own.
    """

    kind = "medusa"


@dataclass(frozen=True, slots=True)
class PardOptions(TrainOptions):
    """A training of a PARD model, which fills in the masks of a whole draft in one pass; saved for Transformers.

    Attributes:
        depth: tokens of a draft; all but the first are masks.
        draft: the language model to begin with, by folder or hub id, or ``demo-draft``; it has the target's tokenizer.
    """

    kind = "pard"

    lr: Positive = 3e-4
    draft: str = field(kw_only=True)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

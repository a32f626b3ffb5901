"""The texts to train on: prompts of a file, and the target's continuations, decoded by emssd."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emssd.data.prompts import FailedPrompt, encode_text
from emssd.data.records import RecordsConfig, content_of, records_in, to_prompts
from emssd.decoding.assembly import eos_token_ids
from emssd.decoding.engine import Engine
from emssd.decoding.options import EngineOptions
from emssd.errors import OutputError, PromptError
from emssd.model import TargetModel
from emssd.sampling import SamplingParams
from emssd.sequences import Request
from emssd_heads.training.options import TrainOptions

__all__ = ["Decoder", "Text", "frequent_tokens", "generate_texts", "kept_texts", "read_prompts", "writing"]

_TOGETHER = 64  # texts that are written at once; an interrupted run begins anew with the first of them


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """For a body that writes to `path`. Raises OutputError: that is not possible."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt, and of the target's continuation."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def frequent_tokens(texts: Iterable[Text], vocab_size: int, count: int | None) -> list[int] | None:
    """The `count` tokens that are most frequent in new tokens, in order of their ids; ``None`` for all tokens.

    Lower ids win ties. Tokens that do not occur come last.
    """
    if count is None or count >= vocab_size:
        return None
    counts = Counter(token for text in texts for token in text.output)
    return sorted(sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:count])


def read_prompts(options: TrainOptions, max_len: int, tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of the prompts of a file. Those that leave no room for new tokens in `max_len` are left out."""
    name, content = content_of(options.data, "--data ")
    config = RecordsConfig(field=options.field, template=options.template, limit=options.limit)
    prompts = []
    for prompt in to_prompts(records_in(name, content, "--data reads nothing else"), config, name):
        if isinstance(prompt, FailedPrompt):
            raise PromptError(re.sub(r"\bdata\.(field|template)\b", r"--\1", prompt.error))
        prompts.append(tuple(encode_text(prompt.text, tokenizer, prompt.prompt_id)))
    room = max_len - options.max_new_tokens
    if fitting := [ids for ids in prompts if len(ids) <= room]:
        return fitting
    raise PromptError(
        f"no prompt of {name} leaves room for --max-new-tokens {options.max_new_tokens} in the model's {max_len}"
    )


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes with a target as `options` say."""

    options: TrainOptions
    target: TargetModel
    tokenizer: Any

    def engine(self, drafter: Any, **options: Any) -> Engine:
        """An engine with the plugin `drafter`, or with these options of one, and with `options` of an engine."""
        engine_options = EngineOptions(batch_size=self.options.batch_size, **options)
        return Engine.assemble(
            self.target, self.tokenizer, drafter=drafter, backend="ragged", budget="fixed", options=engine_options
        )

    def requests(self, prompts: Iterable[tuple[int, Seq[int]]]) -> list[Request]:
        """Requests for pairs of a number and a prompt; the number and the seed decide what is drawn."""
        temperature, limit = self.options.temperature, self.options.max_new_tokens
        sampling = SamplingParams(temperature=temperature, seed=self.options.seed) if temperature else None
        eos = eos_token_ids(self.target, self.tokenizer)
        return [Request(str(number), tuple(ids), limit, eos, sampling=sampling) for number, ids in prompts]


def generate_texts(
    file: Path, kept: Seq[Text], prompts: Seq[tuple[int, ...]], decoder: Decoder, tell: Callable[[int], None]
) -> list[Text]:
    """The texts of all prompts, in their order; those that are not `kept` are made, and added to `file`.

    `tell` gets the number of texts that are done.
    """
    texts = [*kept]
    engine = decoder.engine("none", prefix_caching=False)  # what one text leaves to the next is lost to a resumed run
    with writing(file), file.open("a", encoding="utf-8") as out:
        while len(texts) < len(prompts):
            tell(len(texts))
            first, some, done = len(texts), prompts[len(texts) : len(texts) + _TOGETHER], dict[int, Text]()
            for generation in engine.run(decoder.requests(enumerate(some, start=first))):
                done[int(generation.request_id)] = Text(generation.prompt_ids, generation.token_ids)
                tell(first + len(done))
            texts += (new := [done[number] for number in sorted(done)])
            out.writelines(json.dumps({"prompt": text.prompt, "output": text.output}) + "\n" for text in new)
            out.flush()
    return texts


def kept_texts(file: Path, prompts: Seq[tuple[int, ...]]) -> list[Text]:
    """The texts in `file` of batches that were written whole; the rest is cut off."""
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    whole = len(lines) if len(lines) >= len(prompts) else len(lines) // _TOGETHER * _TOGETHER
    texts = []
    try:
        for line in lines[:whole]:
            record = json.loads(line)
            texts.append(Text(tuple(record["prompt"]), tuple(record["output"])))
    except (ValueError, LookupError, TypeError) as error:
        raise OutputError(f"{file} is damaged in line {len(texts) + 1}; remove it to generate texts anew") from error
    if [text.prompt for text in texts] != list(prompts[: len(texts)]) or len(texts) > len(prompts):
        raise OutputError(f"{file} has texts of other prompts; give the file that it was begun with, or remove it")
    with file.open("rb+") as out:
        out.truncate(sum(len(line) + 1 for line in lines[:whole]))
    return texts

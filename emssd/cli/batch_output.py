"""``batch_output.jsonl``: the rows of a run as answers in the format of OpenAI's Batch API, one line per request.

Source: the API reference's "The request output object" of batches, and its pages on completions and chat completions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

from emssd.cli.lines_file import whole_file
from emssd.data.prompts import FailedPrompt, Prompt
from emssd.data.typed import read_json
from emssd.sequences.token_bytes import TokenBytes

__all__ = ["BATCH_OUTPUT", "write_batch_output"]

BATCH_OUTPUT = "batch_output.jsonl"
_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_LEAST = -9999.0  # how the API writes a log-probability that is none
_Row = dict[str, Any]


def write_batch_output(
    folder: Path, prompts: Iterable[Prompt], failed: Seq[FailedPrompt], model: str, load_tokenizer: Callable[[], Any]
) -> None:
    """Make the file of the rows in ``generations.jsonl``, in the order of `prompts`, whole or not at all.

    Those that `failed` come last. The tokenizer is loaded if a row has log-probabilities.
    """
    failed_ids = {item.prompt_id for item in failed}  # a sample of such a prompt may have a row
    origin = {"created": int(time.time()), "model": model}
    token_bytes = cache(lambda: TokenBytes(load_tokenizer()))
    with whole_file(folder / BATCH_OUTPUT) as file:
        wanted = [prompt for prompt in prompts if prompt.prompt_id not in failed_ids]
        for prompt, rows in _rows_of(folder / "generations.jsonl", wanted):
            file.write(_line(prompt.prompt_id, 200, _body(prompt, rows, origin, token_bytes)))
        for item in failed:
            why = {"message": item.error, "type": "invalid_request_error", "param": None, "code": None}
            file.write(_line(item.prompt_id, 400, {"error": why}))


def _rows_of(path: Path, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, list[_Row]]]:
    """The rows of each prompt that has some, in the order of their samples."""
    if not path.exists():  # all prompts failed
        return
    places: defaultdict[str, dict[int, int]] = defaultdict(dict)  # a job may have more rows than memory has room for
    offset = 0
    with path.open("rb") as file:
        for line in file:
            row = read_json(line)
            places[row["id"]][row.get("sample", 0)] = offset
            offset += len(line)
        for prompt in prompts:
            rows = []
            for _, offset in sorted(places.get(prompt.prompt_id, {}).items()):
                file.seek(offset)
                rows.append(read_json(file.readline()))
            if rows:
                yield prompt, rows


def _body(prompt: Prompt, rows: Seq[_Row], origin: _Row, token_bytes: Callable[[], TokenBytes]) -> _Row:
    is_chat, name = prompt.messages is not None, _digest(prompt.prompt_id)
    num_prompt, num_new = rows[0]["num_prompt_tokens"], sum(len(row["token_ids"]) for row in rows)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        **origin,
        "choices": [_choice(row, index, token_bytes, is_chat=is_chat) for index, row in enumerate(rows)],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }


def _choice(row: _Row, index: int, token_bytes: Callable[[], TokenBytes], *, is_chat: bool) -> _Row:
    logprobs, text = None, row["text"]
    if (tokens := row.get("logprobs")) is not None:
        logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(tokens, token_bytes())
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {"index": index, **said, "finish_reason": _REASONS[row["finish_reason"]], "logprobs": logprobs}


def _chat_logprobs(tokens: Iterable[_Row], token_bytes: TokenBytes) -> _Row:
    def told(token: int, logprob: float | None) -> _Row:
        content = token_bytes(token)
        return {"token": _text(content), "logprob": _number(logprob), "bytes": list(content)}

    content = [
        told(each["token_id"], each["logprob"]) | {"top_logprobs": [told(*other) for other in each["top"]]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Iterable[_Row], token_bytes: TokenBytes) -> _Row:
    texts, shares, tops, offsets, offset = list[str](), list[float](), list[dict[str, float]](), list[int](), 0
    for each in tokens:
        texts.append(_text(token_bytes(each["token_id"])))
        shares.append(_number(each["logprob"]))
        tops.append({_text(token_bytes(token)): _number(logprob) for token, logprob in each["top"]})
        offsets.append(offset)
        offset += len(texts[-1])
    return {"tokens": texts, "token_logprobs": shares, "top_logprobs": tops, "text_offset": offsets}


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _number(logprob: float | None) -> float:
    return _LEAST if logprob is None else logprob


def _line(custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    name = _digest(custom_id)
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}
    return f"{json.dumps(line)}\n".encode()


def _digest(custom_id: str) -> str:
    """The part of ids that tells requests apart, the same each time."""
    return hashlib.sha256(custom_id.encode(errors="surrogatepass")).hexdigest()[:32]

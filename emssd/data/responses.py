"""``/v1/responses`` of OpenAI's API: its requests as chats, and answers with one message, whole or as events.

Source: the API reference's pages on responses and their streaming events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from typing import Any

from emssd.errors import PromptError

__all__ = ["RESPONSES", "Response", "format_of", "messages_of"]

RESPONSES = "/v1/responses"

_Row = dict[str, Any]


def messages_of(line: str, body: Mapping[str, Any]) -> list[Any]:
    """The messages of a chat that asks the same. Raises PromptError, which says `line`: there are none."""
    asked = body.get("input")
    if not isinstance(asked, str | list):
        raise PromptError(f"{line}: input is of type {type(asked).__name__}; it must be a text, or a list of messages")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [_message(item) for item in asked]
    instructions = body.get("instructions")
    return messages if instructions is None else [{"role": "system", "content": instructions}, *messages]


def _message(item: Any) -> Any:
    """A message of a chat; an earlier answer may be one."""
    if not isinstance(item, dict):
        return item
    message = {name: value for name, value in item.items() if name not in ("id", "status", "phase")}
    if message.get("type") == "message":
        del message["type"]
    if isinstance(parts := message.get("content"), list):
        message["content"] = [_text_part(part) for part in parts]
    return message


def _text_part(part: Any) -> Any:
    is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
    return {"type": "text", "text": part.get("text")} if is_text else part


def format_of(line: str, body: Mapping[str, Any]) -> Any:
    """The form of the answer that ``text`` names. Raises PromptError, which says `line`: it names something else."""
    text = body.get("text", {})
    if not isinstance(text, dict) or text.keys() - {"format"}:
        raise PromptError(f"{line}: text is {text!s:.60}; emssd takes its format alone")
    return text.get("format")


class Response:
    """Writes an answer with one message; its row is as ``generations.jsonl`` has it.

    Args:
        origin: the fields ``id``, in front of which its kind is put, ``created`` and ``model``.
    """

    def __init__(self, origin: Mapping[str, Any]) -> None:
        self._origin, self._numbers = origin, count()

    def whole(self, rows: Seq[_Row]) -> _Row:
        """The body of the answer; of one that has no row yet, its beginning."""
        num_prompt, num_new = (rows[0]["num_prompt_tokens"], len(rows[0]["token_ids"])) if rows else (0, 0)
        is_cut = bool(rows) and rows[0]["finish_reason"] == "length"
        status = "incomplete" if is_cut else "completed" if rows else "in_progress"
        usage = {"input_tokens": num_prompt, "output_tokens": num_new, "total_tokens": num_prompt + num_new}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{self._origin['id']}", "object": "response", "created_at": self._origin["created"],
            "model": self._origin["model"], "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(status, [_part(row["text"])]) for row in rows],
            "usage": usage | details if rows else None,
            "tools": [], "tool_choice": "auto", "parallel_tool_calls": False,
        }  # fmt: skip

    def parts(self, index: int, text: str, row: _Row | None = None) -> Iterator[_Row]:
        """The events of new `text`. An empty text begins the answer; its finished `row` ends it."""
        if not text and row is None:
            for name in ("created", "in_progress"):
                yield self._event(name, {"response": self.whole([])})
            yield self._event("output_item.added", {"item": self._item("in_progress", [])})
            yield self._event("content_part.added", {"part": _part("")})
        if text:
            yield self._event("output_text.delta", {"delta": text, "logprobs": []})
        if row is not None:
            response = self.whole([row])
            (item,) = response["output"]
            yield self._event("output_text.done", {"text": row["text"], "logprobs": []})
            yield self._event("content_part.done", {"part": item["content"][0]})
            yield self._event("output_item.done", {"item": item})
            yield self._event(response["status"], {"response": response})

    def _event(self, name: str, fields: _Row) -> _Row:
        place = {"item_id": f"msg_{self._origin['id']}", "output_index": 0, "content_index": 0}
        event = {"type": f"response.{name}", "sequence_number": next(self._numbers)}
        return event | fields if "response" in fields else event | place | fields

    def _item(self, status: str, content: list[_Row]) -> _Row:
        item = {"id": f"msg_{self._origin['id']}", "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}


def _part(text: str) -> _Row:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

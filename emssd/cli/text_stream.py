"""`TextStream`: the text of one row as it grows; on a terminal, `TerminalStream` shows drafted tokens in a colour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from emssd.cli.console import harmless
from emssd.sequences import Row, Stop, StopStrings
from emssd.sequences.token_bytes import BYTE_TOKEN

__all__ = ["TerminalStream", "TextStream"]

_DRAFTED = "green"


class TextStream:
    """``stream(row)`` after each step shows the new text of `row`, as far as no later token can change it.

    That is whole characters, and none that a stop string could still cut off. A stop string of n bytes reaches at most
    n - 1 bytes in front of the token that completes it.

    Args:
        show: gets a piece of text, and whether it was drafted.
    """

    def __init__(self, tokenizer: Any, stop: Stop | None, show: Callable[[str, bool], None]) -> None:
        self._tokenizer, self._show_piece = tokenizer, show
        strings = stop.strings if isinstance(stop, StopStrings) else ()
        self._held = max((len(string.encode()) - 1 for string in strings), default=0)  # characters, at most
        self._num_tokens = self._num_accepted = self._since = self._until = 0
        self._waiting = deque[tuple[str, bool]]()  # pieces of text, and whether they were drafted
        self._shown = ""

    def __call__(self, row: Row) -> None:
        output, num_before = row.output_ids, self._num_tokens
        num_drafted = row.num_accepted - self._num_accepted  # the target's own token comes after them
        self._num_tokens, self._num_accepted = len(output), row.num_accepted
        for index in range(num_before, len(output)):
            if piece := self._piece(output[: index + 1]):
                self._waiting.append((piece, index - num_before < num_drafted))
        room = sum(len(piece) for piece, _ in self._waiting) - self._held
        while room > 0 and row.finish_reason is None:  # else `end` knows what is left
            piece, drafted = self._waiting.popleft()
            self._show(piece[:room], drafted)
            if rest := piece[room:]:
                self._waiting.appendleft((rest, drafted))
            room -= len(piece)

    def end(self, text: str) -> None:
        """Show what is left of `text`, the whole of the row."""
        left = text.removeprefix(self._shown) if text.startswith(self._shown) else f"\n{text}"
        for piece, drafted in self._waiting:
            if not left.startswith(part := piece[: len(left)]):
                break
            self._show(part, drafted)
            left = left[len(part) :]
        self._show(left, False)

    def _piece(self, tokens: Seq[int]) -> str:
        """The text that the last of `tokens` adds, with bytes of earlier ones; none while a character is not whole.

        It is decoded after the tokens of the piece before, since the first one of a text may lose its leading space. Of
        tokens that stand for a byte, the sentencepiece family loses all that follow one another, special tokens left
        out, if one of them is wrong.
        """
        name = self._tokenizer.convert_ids_to_tokens(tokens[-1]) or ""
        if BYTE_TOKEN.fullmatch(name) or name in self._tokenizer.all_special_tokens:
            return ""
        decode: Callable[..., str] = partial(self._tokenizer.decode, skip_special_tokens=True)
        before, after = (decode(tokens[self._since : end]) for end in (self._until, None))
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._since, self._until = self._until, len(tokens)
        return after[len(before) :]

    def _show(self, text: str, drafted: bool) -> None:
        self._shown += text
        if text:
            self._show_piece(text, drafted)


class TerminalStream(TextStream):
    """Prints to `console`; see `TextStream`. `end` also prints a legend."""

    def __init__(self, console: Console, tokenizer: Any, stop: Stop | None) -> None:
        super().__init__(tokenizer, stop, self._print)
        self._console, self._has_drafted = console, False

    def end(self, text: str) -> None:
        super().end(text)
        self._console.print()
        if self._has_drafted and self._console.color_system and not self._console.no_color:
            legend = Text.assemble((_DRAFTED, _DRAFTED), (": drafted and accepted", "dim"))
            self._console.print(legend, soft_wrap=True)

    def _print(self, text: str, drafted: bool) -> None:
        self._has_drafted |= drafted
        style = Style(color=_DRAFTED) if drafted else None
        self._console.print(Segments([Segment(harmless(text), style)]), end="", soft_wrap=True)  # tabs stay tabs

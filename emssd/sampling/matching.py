"""Outputs of a grammar: which tokens may follow a text, computed once for each text by the library llguidance.

`MatcherState` is a function of the text alone. One matcher serves all states of a row. It goes from state to state:
back to where their texts part, then forward. So a draft, be it a tree, leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from emssd.attention.packed import on_device
from emssd.errors import ConfigError
from emssd.sampling.grammar import Grammar

__all__ = ["Grammars", "MatcherState", "masked"]

Words = npt.NDArray[np.int32]


class MatcherState:
    """The tokens that may follow the text of a row, or the text that leads to a node of its draft. It can only be read.

    Two states with the same text are the same object, as long as the row has not gone on without it.

    Attributes:
        error: why no token could follow a text before this one, so that its row was ended there; ``None`` where one
            could.
    """

    __slots__ = ("_children", "_depth", "_fault", "_mask", "_matcher", "_parent", "_token", "error", "has_ended")

    def __init__(self, matcher: _Matcher, parent: MatcherState | None = None, token: int = -1, *, ended: bool) -> None:
        self._matcher, self._parent, self._token, self.has_ended = matcher, parent, token, ended
        self._fault: str | None = None
        self.error: str | None = None if parent is None else parent._fault or parent.error
        self._depth: int = 0 if parent is None else parent._depth + 1
        self._children: dict[int, MatcherState | None] = {}
        self._mask: Words | None = None

    @property
    def mask(self) -> Words:
        """``[ceil(vocab / 32)]``: bit ``i % 32`` of word ``i // 32`` tells whether token ``i`` may follow.

        Where none may, or the library gives up, these are the tokens that end the row.
        """
        if self._mask is None:
            self._mask, self._fault = self._matcher.mask(self)
        return self._mask

    def allows(self, token: int) -> bool:
        """Whether `token` may follow."""
        return bool(self.mask[token >> 5] >> (token & 31) & 1)

    def after(self, token: int) -> MatcherState | None:
        """The state after `token`; ``None`` if it may not follow."""
        if token not in self._children:
            self._children[token] = self._matcher.child(self, token)
        return self._children[token]

    def forced(self, limit: int) -> list[int]:
        """The tokens that must follow, at most `limit`, as far as there is no choice."""
        return self._matcher.forced(self)[:limit] if limit > 0 else []

    def settled(self, tokens: Seq[int]) -> MatcherState:
        """The state after `tokens`, which are the row's now; what is known of other continuations is dropped."""
        state = self
        for token in tokens:
            following = state.after(token)
            assert following is not None, "the target chooses among what may follow"
            state._children, state._mask = {}, None
            state = following
        return state


class _Matcher:
    """The matcher of one row, which stands after the text of the newest entry of `_stack`."""

    def __init__(self, make: Callable[[], Any], grammar: Grammar, ends: frozenset[int], tokenizer: Any) -> None:
        self._make, self._library, self._grammar, self._ends = make, make(), grammar, sorted(ends)
        self._num_words = -(-tokenizer.vocab_size // 32)
        self._not_from_library = sorted({*ends, int(tokenizer.eos_token)})
        self.start = MatcherState(self, ended=False)
        self._stack = [self.start]

    def mask(self, state: MatcherState) -> tuple[Words, str | None]:
        """See `MatcherState.mask`; and what is wrong, if only ends are left for that reason."""
        words, fault = np.zeros(self._num_words, dtype=np.int32), None
        if not state.has_ended:
            try:
                self._go_to(state)
                # of a copy: once it has a mask, llguidance 1.6 to 1.9 may give it again after another text as long
                copy = self._library.deep_copy()
                allowed = np.frombuffer(copy.compute_bitmask(), dtype=np.int32)[: self._num_words]
                self.check(copy)
                words[: len(allowed)] = allowed
            except ConfigError as error:
                fault = str(error)
        for token in self._not_from_library:
            words[token >> 5] &= ~_bit(token)
        is_whole = state.has_ended or (fault is None and self._library.is_accepting())
        if not is_whole and fault is None and not words.any():
            fault = (
                f"no token of the model can go on with an output of the grammar {self._grammar.text:.60}; is its "
                f"alphabet in the vocabulary?"
            )
        for token in self._ends if is_whole or fault else ():
            words[token >> 5] |= _bit(token)
        words.setflags(write=False)
        return words, fault

    def child(self, state: MatcherState, token: int) -> MatcherState | None:
        if token in self._not_from_library or state._mask is not None or state.has_ended:
            if not state.allows(token):
                return None
            return MatcherState(self, state, token, ended=token in self._ends)
        with suppress(ConfigError):
            self._go_to(state)
            forced = self._library.compute_ff_tokens()
            follows = not (forced and forced[0] != token) and self._library.try_consume_tokens([token]) == 1
            self.check()
            if follows:
                self._stack.append(child := MatcherState(self, state, token, ended=False))
                return child
        return None

    def forced(self, state: MatcherState) -> list[int]:
        if state.has_ended:
            return []
        with suppress(ConfigError):
            self._go_to(state)
            tokens: list[int] = self._library.compute_ff_tokens()
            num_consumed = self._library.try_consume_tokens(tokens)
            self.check()
            if self._library.is_stopped() and len(self._ends) == 1:
                tokens = [*tokens[:num_consumed], *self._ends]
            self._library.rollback(num_consumed)
            return tokens
        return []

    def _go_to(self, state: MatcherState) -> None:
        """Back to where the texts part, then forward."""
        path, at = list[MatcherState](), state
        while at._depth >= len(self._stack) or self._stack[at._depth] is not at:
            path.append(at)
            assert at._parent is not None
            at = at._parent
        if num_back := len(self._stack) - 1 - at._depth:
            self._library.rollback(num_back)
            del self._stack[at._depth + 1 :]
        for following in reversed(path):
            self._library.consume_token(following._token)
            self._stack.append(following)
        self.check()

    def check(self, copy: Any = None) -> None:
        """Raises ConfigError: the library has given up, and a new matcher stands in front of the text again."""
        if (used := copy or self._library).is_error():
            reason = str(used.get_error()).strip().partition("\n")[0]
            if copy is None:
                self._library = self._make()
                del self._stack[1:]
            raise ConfigError(f"llguidance cannot go on with the grammar {self._grammar.text:.60}: {reason}")


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).astype(np.int32)


class Grammars:
    """Grammars for the tokenizer of an engine. The latest step `waited` so many seconds for masks."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._valid = set[tuple[Grammar, frozenset[int]]]()
        self._tokenizers = dict[int, Any]()  # of the library, by the token that ends a text
        self._workers: ThreadPoolExecutor | None = None
        self.waited = 0.0

    def begin(self, grammar: Any, ends: Iterable[int]) -> MatcherState:
        """The state in front of an output of `grammar`, see `Grammar.of`, whose rows end with the tokens `ends`."""
        grammar, matchers = Grammar.of(grammar), self._llguidance.LLMatcher
        ends = frozenset(token for token in ends if token < self._vocab_size)
        if not ends:
            raise ConfigError(
                "sampling.grammar: the model names no EOS token, so that no output could end behind the last token"
            )
        tokenizer = self._library_tokenizer(min(ends))
        text = getattr(matchers, f"grammar_from_{grammar.kind}")(grammar.text)
        if is_new := (grammar, ends) not in self._valid:
            is_wrong, messages = matchers.validate_grammar_with_warnings(text, tokenizer)
            if is_wrong or messages:
                names = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}
                message = f"{' '.join(messages[0].split()):.300}"
                raise ConfigError(f"sampling.grammar: llguidance cannot follow this {names[grammar.kind]}: {message}")
        matcher = _Matcher(lambda: matchers(tokenizer, text), grammar, ends, tokenizer)
        if is_new and (fault := matcher.mask(matcher.start)[1]):
            raise ConfigError(f"sampling.grammar: no output can begin: {fault}")
        self._valid.add((grammar, ends))
        return matcher.start

    @contextmanager
    def beside(self, states: Seq[MatcherState]) -> Iterator[None]:
        """Compute the masks of `states` on a thread of their own, during what is done within."""
        if not states:
            self.waited = 0.0
            yield
            return
        self._workers = self._workers or ThreadPoolExecutor(1, "emssd-masks")
        running = self._workers.submit(lambda: [state.mask for state in states])
        try:
            yield
        finally:
            start = time.perf_counter()
            running.exception()  # a failed step, too, leaves no thread at work
            self.waited = time.perf_counter() - start
        running.result()

    @cached_property
    def _llguidance(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError("a grammar needs the library llguidance: pip install 'emssd[grammar]'") from error
        return llguidance

    def _library_tokenizer(self, end: int) -> Any:
        """The tokenizer for the library. Its EOS token is never text, so `end` is it where the tokenizer names none."""
        if self._tokenizer is None:
            raise ConfigError("a grammar speaks of text, but the engine has no tokenizer; pass one")
        from llguidance.hf import from_tokenizer

        try:
            eos = end if self._tokenizer.eos_token_id is None else self._tokenizer.eos_token_id
            if eos not in self._tokenizers:
                self._tokenizers[eos] = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=eos)
            return self._tokenizers[eos]
        except Exception as error:  # of a Rust library, which says no more of it
            kind = type(self._tokenizer).__name__
            raise ConfigError(f"sampling.grammar: llguidance cannot read this tokenizer, a {kind}: {error}") from error


def masked(logits: torch.Tensor, states: Seq[MatcherState | None]) -> torch.Tensor:
    """``[r, vocab]`` like `logits`, with -inf for tokens that the state of their row does not allow.

    Rows without a state are as they were. In the others no token that is allowed is at -inf or NaN, so that one of them
    is chosen whatever the model gives.
    """
    rows = [row for row, state in enumerate(states) if state is not None]
    if not rows:
        return logits
    words = np.stack([state.mask for state in states if state is not None])
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    allowed = torch.from_numpy(bits.view(np.bool_)).to(logits.device)
    if len(rows) == len(states):
        return torch.where(allowed, logits.nan_to_num(nan=0.0), -torch.inf)
    index = on_device(rows, logits.device)
    return logits.index_copy(0, index, torch.where(allowed, logits[index].nan_to_num(nan=0.0), -torch.inf))

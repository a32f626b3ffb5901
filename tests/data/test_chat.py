"""A conversation has the ids that Transformers gives it, or one sentence; of the template if that is at fault."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from emssd.data.chat import encode_chat
from emssd.data.prompts import encode_text
from emssd.errors import ConfigError, PromptError
from tests.cli.conftest import byte_tokenizer
from tests.support.tiers import looped

ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
REFUSES = "prompt 7: the tokenizer's chat template refuses the conversation: "


def make_tokenizer(template: Any) -> PreTrainedTokenizerFast:
    """A token per byte, and BOS in front of texts."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@looped(
    "template",
    [
        PLAIN,
        "{{ bos_token }}" + PLAIN,
        "{{ bos_token }}{{ bos_token }}" + PLAIN,  # twice, as its authors want it
        "{{ bos_token }}" + PLAIN + "{% if add_generation_prompt %}[a]{% endif %}",
        {"tools": "x", "default": "{{ bos_token }}" + PLAIN},
    ],
)
def test_a_conversation_has_the_ids_that_transformers_gives_it(template: Any) -> None:
    tokenizer = make_tokenizer(template)
    expected = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert encode_chat(ASK, tokenizer) == expected


@looped(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must\n  alternate') }}", "roles must alternate$"),
        ("{{ raise_exception('a' * 5000) }}", "a{200}…$"),
        ("{{ messages[0].plan.steps }}", "'dict object' has no attribute 'plan'$"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe.$"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe.$"),
        ("{% for i in range(10 ** 7) %}a{% endfor %}", "Range too big"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(1) }}", "maximum recursion depth exceeded"),
        ("{{ 1 / 0 }}", "division by zero$"),
    ],
)
def test_a_template_that_raises_refuses_this_conversation_in_one_line(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=REFUSES + said):
        encode_chat(ASK, make_tokenizer(template), "7")


@pytest.fixture
def no_tracer() -> Iterator[None]:
    """An exception that falls into a tracer, as coverage has one, ends the tracing and is lost."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, r"it takes more than 0.05 s$"),
        ("{{ lipsum(n=10 ** 8) }}", "it takes more than 0.05 s$"),
        ("{{ 'a' * 3000 }}", "it makes 3000 characters of it, and more than 2000 are no prompt$"),
    ],
)
@pytest.mark.usefixtures("no_tracer")
def test_a_template_without_end_is_stopped(template: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emssd.data.chat._MOST_SECONDS", 0.05)
    monkeypatch.setattr("emssd.data.chat._MOST_CHARACTERS", 2000)
    with pytest.raises(PromptError, match=REFUSES + said):
        encode_chat(ASK, make_tokenizer(template), "7")


@pytest.mark.timeout(30)
def test_a_conversation_is_encoded_under_a_debugger() -> None:
    """Python 3.11 loops forever in a traced call, once an asynchronous exception was taken back."""
    tracer = sys.gettrace()
    sys.settrace(lambda *_: lambda *_: None)
    try:
        assert encode_chat(ASK, make_tokenizer(PLAIN))
    finally:
        sys.settrace(tracer)


def test_a_template_that_writes_nothing_is_told_and_is_no_empty_prompt() -> None:
    with pytest.raises(PromptError, match="prompt 7: the tokenizer's chat template makes an empty text"):
        encode_chat(ASK, make_tokenizer("{% if false %}x{% endif %}"), "7")


def test_a_text_of_which_the_tokenizer_makes_nothing_is_no_empty_prompt() -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(PromptError, match="prompt 7 is a text of which the tokenizer makes no token"):
        encode_chat([{"role": "user", "content": "  "}], tokenizer, "7")
    with pytest.raises(PromptError, match="prompt 8 is a text of which the tokenizer makes no token"):
        encode_text("  ", tokenizer, "8")


@looped(
    ("template", "why"),
    [
        (5, "it is 5, and no text"),
        ({"tools": PLAIN}, "it has several, and none is named default"),
        ({"default": [PLAIN]}, "and no text"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages | unheard_of }}", "No filter named 'unheard_of'"),
        ("{% break %}", "outside loop"),
    ],
)
def test_a_template_that_no_conversation_could_use_is_no_fault_of_a_prompt(template: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"chat template cannot be used: .*{why}.*; mend it in chat_template.jinja"):
        encode_chat(ASK, make_tokenizer(template))


@looped("tokenizer", [None, object(), make_tokenizer(None), make_tokenizer("")])
def test_without_a_template_the_way_out_is_told(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs a tokenizer with a chat template.*data\.template"):
        encode_chat(ASK, tokenizer)


def test_messages_may_come_in_any_sequence() -> None:
    tokenizer = make_tokenizer(PLAIN)
    assert encode_chat(iter(ASK), tokenizer) == encode_chat(tuple(ASK), tokenizer) == encode_chat(ASK, tokenizer)


@looped("messages", [None, 5, "hi", ASK[0], []])
def test_what_is_no_list_of_messages_is_told(messages: Any) -> None:
    with pytest.raises(PromptError, match="prompt 7 is no list of messages"):
        encode_chat(messages, make_tokenizer(PLAIN), "7")


@looped(
    ("message", "missing"),
    [
        (None, "role"),
        (["role", "content"], "role"),
        ({"role": 3, "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "content"),
    ],
)
def test_a_message_of_other_types_is_told_by_its_number(message: Any, missing: str) -> None:
    with pytest.raises(PromptError, match=f"prompt 7: message 2 has no text '{missing}'; a message is"):
        encode_chat([*ASK, message], make_tokenizer(PLAIN), "7")

"""Prompts: where they come from, and how they become token ids."""

from emssd.data import demo as demo
from emssd.data.prompts import FailedPrompt, Prompt, encode_text
from emssd.data.records import read_texts
from emssd.data.typed import read_json, typed

__all__ = ["FailedPrompt", "Prompt", "encode_text", "read_json", "read_texts", "typed"]

"""Drafters for vLLM with options of their own: ``"model": "my_drafters.Mine"``."""

from emssd.integrations.vllm import proposer

Mine = proposer("suffix", num_speculative_tokens=8, cache_tokens=100_000)

"""Drafts of emssd's `suffix` inside vLLM: python examples/vllm_generate.py MODEL."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts processes that import this file
    speculation = {"method": "custom_class", "model": "emssd.integrations.vllm.suffix", "num_speculative_tokens": 8}
    llm = LLM(sys.argv[1], speculative_config=speculation, max_model_len=256)
    for output in llm.generate(["One, two, three, one, two,"], SamplingParams(temperature=0, max_tokens=24)):
        print(output.outputs[0].text)

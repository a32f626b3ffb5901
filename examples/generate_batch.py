from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import emssd
from emssd.data.demo import model_path

path = str(model_path("target"))  # or any folder or hub id
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
prompts = tokenizer(["The for statement", "Lambda expressions are"])["input_ids"]
config = GenerationConfig(max_new_tokens=40, eos_token_id=tokenizer.eos_token_id)
with emssd.speculate(model, tokenizer, drafter="suffix"):
    outputs = model.generate_batch(prompts, config)
    for output in outputs.values():
        print(tokenizer.decode(output.generated_tokens))

    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    name = manager.add_request(prompts[0], streaming=True, sampling=emssd.SamplingParams(temperature=0.7, seed=3))
    for output in manager.request_id_iter(name):
        print(len(output.generated_tokens), "tokens so far")
    print(output.generation.text)
    manager.stop()

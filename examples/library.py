from emssd import Engine, demo

engine = Engine.from_pretrained("demo", drafter="suffix", budget="fixed", batch_size=8)
prompts = [prompt.text for prompt in demo.prompts(limit=2)]  # or any list of texts
for generation in engine.stream(prompts, max_new_tokens=120):  # as rows finish; engine.generate returns a list
    print(generation.text.strip().splitlines()[0], f"… (τ {generation.acceptance_length:.2f})")

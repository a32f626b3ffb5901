from emssd import Engine

engine = Engine.from_pretrained("demo", drafter="suffix", backend="ragged", batch_size=8)
prompts = ["The for statement is used to iterate over", 'The "assert" statement\n']
for generation in engine.stream(prompts, max_new_tokens=40):  # as rows finish; engine.generate returns a list
    print(generation.request_id, generation.text, f"(τ {generation.acceptance_length:.2f})")

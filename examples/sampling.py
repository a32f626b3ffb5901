from emssd import Engine
from emssd.sampling import SamplingParams

prompts = ["The for statement is used to iterate over", 'The "assert" statement\n']
sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
texts = {}
for drafter, batch_size in (("none", 1), ("suffix", 8)):
    engine = Engine.from_pretrained("demo", drafter=drafter, batch_size=batch_size)
    texts[drafter] = [done.text for done in engine.generate(prompts, max_new_tokens=40, sampling=sampling)]
print(texts["suffix"] == texts["none"])  # True: the seed decides, and no drafter

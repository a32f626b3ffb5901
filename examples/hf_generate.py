from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import emssd
from emssd.data.demo import model_path

path = str(model_path("target"))  # or any folder or hub id
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(path)
inputs = tokenizer(["The for statement", "Lambda expressions are"], padding=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, custom_generate=emssd.custom_generate, drafter="suffix")
print(tokenizer.batch_decode(output, skip_special_tokens=True))

generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
text = "The for statement"
answers = generator(text, max_new_tokens=40, do_sample=False, custom_generate=emssd.custom_generate, drafter="suffix")
print(answers[0]["generated_text"])

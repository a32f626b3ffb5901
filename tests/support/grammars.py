"""Random schemas and expressions, judges of their texts that know nothing of a grammar library, and a tokenizer."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from emssd.sampling.grammar import Grammar

EOS = 1
_MERGES = ['" :', '": "', '" ,', '", "', "t r", "u e", "tr ue", "f a", "l s", "ls e", "fa lse", "a b", "ab a", "1 0"]
_MERGES += ["b c", "} }", '" }', "[ ]", "n a", "m e", "na me", '{ "', '{" name', "a 1", ', "', "0 ,"]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """All bytes, and some longer tokens that cross the borders of JSON's own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first, second in (part.split(" ") for part in _MERGES)]
    names = ["<pad>", "</s>", "<|x|>", *alphabet, *(first + second for first, second in merges)]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "</s>", "<|x|>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def random_grammar(seed: int) -> Grammar:
    """A schema or an expression whose texts are short."""
    draw = random.Random(seed)
    if draw.random() < 0.4:
        return Grammar("regex", _expression(draw, 3))
    schema = _schema(draw, 2)
    if draw.random() < 0.7:
        schema["x-guidance"] = {"whitespace_flexible": False}
    return Grammar("json_schema", json.dumps(schema))


def is_valid(text: str, grammar: Grammar) -> bool:
    """Whether `text` is one of the grammar's; judged by `re`, or by `json` and `fits`."""
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    try:
        return fits(json.loads(text), json.loads(grammar.text))
    except ValueError:
        return False


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` fits a schema with the keywords of `random_grammar`."""
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return any(value == part and type(value) is type(part) for part in choices)
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= value.keys() <= properties.keys()
                and all(fits(part, properties[name]) for name, part in value.items())
            )
        case "array" if "prefixItems" in schema:
            kinds = schema["prefixItems"]
            return isinstance(value, list) and len(value) == len(kinds) and all(map(fits, value, kinds))
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(fits(part, schema["items"]) for part in value)
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string" if "pattern" in schema:
            return isinstance(value, str) and re.search(schema["pattern"], value) is not None
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "boolean":
            return type(value) is bool
    return value is None


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "string", "pattern", "boolean", "null", "enum", "const"]
    match draw.choice(kinds + ["object", "array", "object", "tuple", "anyOf"] * (2 * depth)):
        case "object":
            names = draw.sample(["name", "a", "ab", "é", 'q"', "tr ue", "1"], draw.randint(0, 3))
            properties = {name: _schema(draw, depth - 1) for name in names}
            required = [name for name in names if draw.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = draw.randint(0, 2)
            return {
                "type": "array",
                "items": _schema(draw, depth - 1),
                "minItems": least,
                "maxItems": least + draw.randint(0, 2),
            }
        case "tuple":
            items = [_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "pattern":
            return {"type": "string", "pattern": f"^({_expression(draw, 1)})$"}
        case "const":
            return {"const": draw.choice(["name", 7, "true, ", False, None, draw.randint(-99, 99)])}
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(2)]}
        case "integer":
            least = draw.randint(-20, 200)
            return {"type": "integer", "minimum": least, "maximum": least + draw.choice([0, 3, 150])}
        case "string":
            least = draw.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 4)}
        case "enum":
            return {"enum": draw.sample(["name", "true", 10, 'a"b', None, True, "aba", "ab"], draw.randint(1, 4))}
        case other:
            return {"type": other}


def _expression(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(["a", "b", "ab", "true", "10", "[a-c]", "[0-9]", "[^a-z]", ": ", "name"])
    one, other = _expression(draw, depth - 1), _expression(draw, draw.randint(0, depth - 1))
    forms = [one + other, f"({one}|{other})", f"({one}){{1,3}}", f"({one})?{other}", f"({one})*{other}", one]
    return draw.choice(forms)

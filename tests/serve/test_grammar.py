"""JSON by grammar: whatever a model would write, the answer is of the schema, and the same with drafts and without."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.models import build, engine_over
from tests.serve.served import MODEL, byte_tokenizer, served
from vericache_core.engine import Engine
from vericache_core.errors import UsageError
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.grammar import Grammars

END = 256
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "number"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def engine(**settings: Any) -> Engine:
    """A random Llama over bytes that knows an end: alone it writes no JSON."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    model = build("llama", vocab_size=END + 1, eos_token_id=END)
    return engine_over(model, tokenizer, **{"compressor": "random", "keep": 0.5, **settings})


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 3}])
def test_an_answer_is_of_the_schema_and_what_plain_decoding_gives(sampled: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    with engine(compressor=None, keep=None) as plain:
        mask = Grammars(plain.tokenizer, END + 1, [END]).json(SCHEMA)
        params = SamplingParams(max_new_tokens=300, logits_processors=(mask,), **sampled)
        expected, again = plain.generate([MESSAGES] * 2, params)
    assert expected.token_ids == again.token_ids
    with (
        served(engine()) as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client,
    ):
        body: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "response_format": form, **sampled}
        answer = client.chat.completions.create(**body)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == expected.text
    value = json.loads(expected.text)
    assert set(value) == {"colour", "number"}
    assert value["colour"] in {"red", "blue"}
    assert 0 <= value["number"] <= 99
    assert answer.model_dump()["vericache"][0]["drafted"] > 0


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="no token that ends"):
        Grammars(byte_tokenizer(), END, []).json(SCHEMA)

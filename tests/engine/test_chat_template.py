from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specengine.core.errors import RequestError
from specengine.engine.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenizer(template: str | None) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={name: index for index, name in enumerate(alphabet)}, merges=[])
    bytes_only = Tokenizer(model)
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, chat_template=template)


def test_renders_up_to_the_answer() -> None:
    one = tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert one.decode(render_chat(one, MESSAGES)) == "user: hi\nassistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing() }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for", "refuses these messages"),
    ],
)
def test_refusals_name_the_messages(template: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(tokenizer(template), MESSAGES)
    assert caught.value.param == "messages"

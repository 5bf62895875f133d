"""Tokenizers made here, since none can be fetched: byte-level BPE, and the special tokens that a chat format asks for."""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As SmolLM2 has it: it knows no tools."""
FEW_WORDS = 'user assistant system tool the call "name": "arguments": {"x": function\n\nhello world think'
_SPECIAL = re.compile(r"<[^<>\s]+>|\[[^\[\]]+\]|〈[^〈]+〉|｜[^｜]+｜|[\[\]][!~a-z]+[\[\]]")


class ByteTokenizer(PreTrainedTokenizerFast):
    """While it `learns`, what somebody asks for by name and looks like a special token becomes one: so each family's renderer
    finds its own."""

    learns = False

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            self._know(tokens)
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        self._know(text)
        return super().encode(text, *args, **kwargs)

    def _know(self, token: str) -> None:
        if self.learns and _SPECIAL.fullmatch(token) and token not in self.get_added_vocab():
            self.add_tokens([AddedToken(token, special=False, normalized=False)])


def byte_tokenizer(
    *,
    eos: str = "<|im_end|>",
    bos: str | None = None,
    template: str | None = None,
    known: tuple[str, ...] = (),
    text: str = FEW_WORDS,
    size: int = 330,
) -> ByteTokenizer:
    """`known`: tokens that its chat template writes, beside the end-of-sequence token. `size` tokens are learned of `text`: by
    default little more than bytes."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([text] * 4, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tokenizer = ByteTokenizer(tokenizer_object=core)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in (eos, bos, *known) if token])
    tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template = eos, bos, template
    return tokenizer

"""A character tokenizer as Hugging Face and vLLM load it: one token per character, `<bos>` in front of a prompt.

It knows the characters of written-out sums and nothing else; any other character is `<unk>`.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = "0123456789+-=;# "


def character_tokenizer(max_context: int) -> PreTrainedTokenizerFast:
    """Token ids: special tokens first, then `CHARACTERS` in order. `max_context` in tokens."""
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )

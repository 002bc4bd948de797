"""Rebuilds the Hugging Face tokenizer from the metadata of a GGUF file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outpace.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type; 5 is unused, 6 is one byte
_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",  # spelt like this in the format
    "mask": "mask_token_id",
}
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class ByteLevelKind:
    """The differences between families of byte-level BPE tokenizers."""

    words: str  # regular expression that splits text into words
    digits: bool = False  # each digit is a separate word
    nfc: bool = False  # normalize text to Unicode NFC
    ignore_merges: bool = False  # a word in the vocabulary is one token, even without merges
    add_bos: bool = False  # default if the file does not say


# tokenizer.ggml.pre -> kind
BYTE_LEVEL_KINDS = {
    "smollm": ByteLevelKind(_GPT2_WORDS, digits=True),
    "llama-bpe": ByteLevelKind(_LLAMA3_WORDS, ignore_merges=True, add_bos=True),
    "qwen2": ByteLevelKind(_QWEN2_WORDS, nfc=True),
    "gpt-2": ByteLevelKind(_GPT2_WORDS),
    "default": ByteLevelKind(_GPT2_WORDS),
}


def build_tokenizer(metadata: Mapping[str, Any], max_length: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer that the metadata of a GGUF file describes."""
    tokens, kinds = _vocabulary(metadata, vocab_size)
    model = metadata["tokenizer.ggml.model"]
    if model not in _BUILDERS:
        raise ModelError(f"tokenizer.ggml.model: {model!r} is not supported; supported: {', '.join(_BUILDERS)}")
    tokenizer = _BUILDERS[model](metadata, tokens, kinds)
    roles = {f"{role}_token": token for role, key in _ROLES.items() if (token := _named(metadata, key, tokens))}
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    special += [token for token in roles.values() if token not in special]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and token not in special]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **roles,
    )


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    tokens: list[str] = _required(metadata, "tokens")
    kinds: list[int] = _required(metadata, "token_type")
    if len(kinds) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type: has {len(kinds)} entries for {len(tokens)} tokens")
    if len(tokens) > vocab_size:
        raise ModelError(f"tokenizer.ggml.tokens: {len(tokens)} tokens, but the model embeds only {vocab_size}")
    if len(set(tokens)) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens: the same token occurs twice; convert the model again")
    return tokens, kinds


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """`tokenizer.ggml.model` gpt2: BPE over bytes written as printable characters."""
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in BYTE_LEVEL_KINDS:
        known = ", ".join(BYTE_LEVEL_KINDS)
        raise ModelError(f"tokenizer.ggml.pre: {pre!r} is not supported; supported: {known}")
    kind = BYTE_LEVEL_KINDS[pre]
    merges = [_pair(merge) for merge in _required(metadata, "merges")]
    tokenizer = _bpe(tokens, merges, ignore_merges=kind.ignore_merges)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.words == _GPT2_WORDS:  # ByteLevel's built-in expression, as published files use it
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps.append(pre_tokenizers.Split(Regex(kind.words), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _ends(metadata, tokens, add_bos=kind.add_bos)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """`tokenizer.ggml.model` llama: SentencePiece BPE, where scores define the order of merges."""
    scores = _required(metadata, "scores")
    if len(scores) != len(tokens):
        raise ModelError(f"tokenizer.ggml.scores: has {len(scores)} entries for {len(tokens)} tokens")
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    merges = _merges_of_scores(tokens, scores, kinds)
    tokenizer = _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.post_processor = _ends(metadata, tokens, add_bos=True)
    return tokenizer


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], list[str], list[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # tokenizers raises plain Exception, e.g. for a merge that is not in the vocabulary
        raise ModelError(f"tokenizer.ggml.merges: {error}; convert the model again") from error


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(f"tokenizer.ggml.merges: {merge!r} is not two tokens with a space between; convert it again")
    return merge[:cut], merge[cut + 1 :]


def _merges_of_scores(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """All ways to make a token from two others, highest score first."""
    ids = {token: index for index, token in enumerate(tokens) if kinds[index] == NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[index], ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _ends(metadata: Mapping[str, Any], tokens: list[str], *, add_bos: bool) -> processors.PostProcessor | None:
    """Adds BOS and EOS tokens to a text, as the file says; None: it needs neither."""
    ends = {}
    for role, default in (("bos", add_bos), ("eos", False)):
        token = _named(metadata, _ROLES[role], tokens)
        asked = metadata.get(f"tokenizer.ggml.add_{role}_token")
        if asked and token is None:
            raise ModelError(f"tokenizer.ggml.add_{role}_token: is set, but the file names no {role} token")
        if token is not None and (default if asked is None else asked):
            ends[role] = token
    if not ends:
        return None
    single = [*([ends["bos"]] if "bos" in ends else []), "$A", *([ends["eos"]] if "eos" in ends else [])]
    second = [f"{'$B' if part == '$A' else part}:1" for part in single]
    known = [(token, tokens.index(token)) for token in set(ends.values())]
    return processors.TemplateProcessing(single, [*single, *second], known)


def _named(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> str | None:
    """The token whose id is the value of a metadata key."""
    index = metadata.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelError(f"tokenizer.ggml.{key}: {index} is outside the vocabulary of {len(tokens)} tokens")
    return str(tokens[index])


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if not (value := metadata.get(f"tokenizer.ggml.{key}")):
        raise ModelError(f"tokenizer.ggml.{key}: missing from the file; convert the model again")
    return value

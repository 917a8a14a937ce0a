"""Text to token ids and back: bytes by default, any tokenizer.json otherwise."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.spec.errors import RequestError, shown
from shoal.train.data.naming import named

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """vocab: number of ids; eod: the id that ends a document; identity: differs between tokenizers that differ."""

    vocab: int
    eod: int
    identity: str

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, texts: Sequence[str]) -> Iterable[np.ndarray]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are the ids 0 to 255; 256 ends a document. Lossless for any text."""

    vocab, eod, identity = 257, 256, "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        return (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, as the `tokenizers` library reads it. Raises RequestError naming data.tokenizer."""

    def __init__(self, path: str):
        from tokenizers import Tokenizer as Library

        self._path = path
        try:
            content = Path(path).read_bytes()
            self._library = Library.from_buffer(content)
        except OSError as error:
            raise RequestError(
                "data.tokenizer",
                f"data.tokenizer = {named(path)} cannot be read ({error.strerror}); bytes or a tokenizer.json would do",
            ) from None
        except Exception as error:  # the library raises plain Exception for whatever it cannot parse
            raise RequestError(
                "data.tokenizer",
                f"data.tokenizer = {named(path)} is not a tokenizer.json ({shown(error)}); bytes would do",
            ) from None
        # A tokenizer.json may carry the limits of the model it came with; a corpus is neither cut nor padded.
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        ends = [number for name in END_NAMES if (number := self._library.token_to_id(name)) is not None]
        if not ends:
            raise RequestError(
                "data.tokenizer",
                f"data.tokenizer = {named(path)} has no token that ends a document; one of {', '.join(END_NAMES)} would do",
            )
        self.eod = ends[0]
        self.identity = hashlib.blake2b(content, digest_size=8).hexdigest()

    def encode(self, text: str) -> list[int]:
        return next(iter(self.encode_all([text]))).tolist()

    def encode_all(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        try:
            encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # a plain one again, for text that its model has no token for
            raise RequestError(
                "data.tokenizer",
                f"data.tokenizer = {named(self._path)} cannot encode the text ({shown(error)}); bytes would do",
            ) from None
        return (np.asarray(one.ids, dtype=np.uint32) for one in encoded)

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(list(ids))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of data.tokenizer: "bytes" or the path of a tokenizer.json. Raises RequestError."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)

"""Prompts as tokens of a checkpoint: bytes for byte-level models, else by the tokenizer that lies beside the weights.

`tokenizer.json` needs the package `tokenizers` (extra "tokenizer"). A tiktoken-style file (`*.tiktoken`,
`tiktoken.model`: a base64 token and its rank on each line) is read here. Its pieces are cut by a plain rule, not by the
model's own pattern: every id is one of the model's and the bytes are the prompt's, but the cuts may differ.
"""

import base64
import binascii
import re
from collections.abc import Callable
from heapq import heappop, heappush
from importlib.util import find_spec
from pathlib import Path

from reference.config import Config

BYTE_LEVEL = 256  # bos of models whose tokens are bytes
PIECE = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\w\s]+|_+|\s+", re.UNICODE)
RANK = re.compile(r"[0-9]{1,9}")
JSON_FILE, TIKTOKEN = "tokenizer.json", ("tiktoken.model", "*.tiktoken")


class TokenizerError(ValueError):
    """No tokenizer, or one that cannot be used. One line that names the file and what is allowed."""


def tokenizer(folder: str | Path, config: Config) -> tuple[Callable[[bytes], list[int]], str]:
    """A function from bytes to token ids, bos first, and the name of what it uses.

    Raises TokenizerError if the model is not byte-level and no usable tokenizer lies in the folder.
    """
    folder = Path(folder)
    if config.bos == BYTE_LEVEL:
        return (lambda data: [config.bos, *data]), "bytes"
    ranked = sorted(p for pattern in TIKTOKEN for p in folder.glob(pattern))
    as_json = folder / JSON_FILE
    for file in (as_json, *ranked):
        if file.exists() and not file.is_file():  # to read a named pipe would wait for a writer
            raise TokenizerError(f"{file}: is {'a folder' if file.is_dir() else 'no regular file'}; allowed are files")
    if as_json.exists() and find_spec("tokenizers"):
        return _checked(_from_json(as_json), as_json, config), as_json.name
    if ranked:
        return _checked(Ranked(ranked[0]).encode, ranked[0], config), ranked[0].name
    if as_json.exists():
        raise TokenizerError(f"{as_json}: needs the package tokenizers, which is not installed (extra 'tokenizer')")
    raise TokenizerError(
        f"{folder}: no tokenizer beside the weights; {config.name} has {config.vocab} tokens and needs {JSON_FILE}, "
        "tiktoken.model or *.tiktoken"
    )


def _checked(encode: Callable[[bytes], list[int]], file: Path, config: Config) -> Callable[[bytes], list[int]]:
    def made(data: bytes) -> list[int]:
        ids = [config.bos, *encode(data)]
        if max(ids) >= config.vocab:
            raise TokenizerError(f"{file}: gives token {max(ids)}; allowed are 0..{config.vocab - 1} of {config.name}")
        return ids

    return made


def _from_json(file: Path) -> Callable[[bytes], list[int]]:
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception
        raise TokenizerError(f"{file}: no tokenizer ({' '.join(str(error).split())[:80]})") from None
    return lambda data: loaded.encode(data.decode("utf-8", "replace"), add_special_tokens=False).ids


class Ranked:
    """Byte-pair encoding by rank: in each piece the adjacent pair of lowest rank is joined first."""

    def __init__(self, file: Path):
        self.ranks: dict[bytes, int] = {}
        try:
            lines = file.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: no tiktoken file ({error})") from None
        for number, line in enumerate(lines, 1):
            try:
                text, rank = line.split()
                token = base64.b64decode(text, validate=True)
                if not RANK.fullmatch(rank):
                    raise ValueError(rank)
            except (ValueError, binascii.Error):
                raise TokenizerError(f"{file}: line {number} is no base64 token and rank") from None
            if token in self.ranks:
                raise TokenizerError(f"{file}: line {number} repeats a token")
            self.ranks[token] = int(rank)
        lacking = [b for b in range(256) if bytes([b]) not in self.ranks]
        if lacking:
            raise TokenizerError(f"{file}: byte {lacking[0]:#04x} has no token; allowed are files with all 256")

    def encode(self, data: bytes) -> list[int]:
        text = data.decode("utf-8", "surrogateescape")
        out: list[int] = []
        at = 0
        for piece in PIECE.finditer(text):  # what the rule skips stands alone
            for part in (text[at : piece.start()], piece[0]):
                out += self._piece(part.encode("utf-8", "surrogateescape"))
            at = piece.end()
        return out + self._piece(text[at:].encode("utf-8", "surrogateescape"))

    def _piece(self, piece: bytes) -> list[int]:
        if piece in self.ranks:
            return [self.ranks[piece]]
        ends = list(range(1, len(piece) + 1))  # of the part that begins at each byte; 0 where none does
        begins = list(range(-1, len(piece) - 1))  # of the part before it
        pairs: list[tuple[int, int, int, int]] = []  # rank, then begin, middle and end: the left of equal ranks first

        def offer(begin: int) -> None:
            middle = ends[begin]
            if middle < len(piece) and piece[begin : ends[middle]] in self.ranks:
                heappush(pairs, (self.ranks[piece[begin : ends[middle]]], begin, middle, ends[middle]))

        for begin in range(len(piece)):
            offer(begin)
        while pairs:
            _, begin, middle, end = heappop(pairs)
            if ends[begin] != middle or ends[middle] != end:
                continue  # one of the two was joined with another meanwhile
            ends[begin], ends[middle] = end, 0
            if end < len(piece):
                begins[end] = begin
                offer(begin)
            if begins[begin] >= 0:
                offer(begins[begin])
        return [self.ranks[piece[begin:end]] for begin, end in enumerate(ends) if end]

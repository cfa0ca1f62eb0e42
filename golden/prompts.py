"""The prompts that the engine decodes, and builders for long contexts.

The short prompts lie in `golden/prompts/<kind>.json`, a list of records of one schema:

    id          "<kind>-<name>", lower case, unique
    kind        the file's stem
    note        what the prompt provokes
    text        a string, or a list of lines joined by newlines; or
    base64      the bytes, where they are not readable UTF-8 text
    times       how often the text or bytes are repeated (default 1)
    max_tokens  how many tokens to decode (default 1024)

A prompt is bytes. For the byte-level configurations its tokens are [bos] and then one token for each byte.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .build import BUILDERS, Needle

FOLDER = Path(__file__).with_suffix("")
MAX_TOKENS = 1024  # decoded where a record names no other number
LONGEST = 1 << 20  # tokens: the positions that K3 serves (SPEC.md 1)
SHORTEST = 4096  # tokens: below this a long context cannot hold its needles
BYTE_VALUES = 256

_FIELDS = {"id": str, "kind": str, "note": str, "text": (str, list), "base64": str, "times": int, "max_tokens": int}
_REQUIRED = ("id", "kind", "note")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_LONG_ID = re.compile(r"long-([a-z]+)-([0-9]{1,9})-s([0-9]{1,9})")


class PromptError(ValueError):
    """A prompt file or a request for a prompt is wrong. The message is one line: where, the value, what is allowed."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. `needles` are the facts a long context hides, with the answers its last question asks for."""

    id: str
    kind: str
    data: bytes
    note: str
    max_tokens: int = MAX_TOKENS
    needles: tuple[Needle, ...] = ()

    def __str__(self) -> str:
        return self.id

    def tokens(self, config) -> list[int]:
        """[bos] + bytes, for a byte-level `config` (reference.config `mini`, `deep`); ValueError for any other."""
        if config.bos != BYTE_VALUES:
            raise PromptError(
                f"configuration {config.name!r} has bos = {config.bos}; prompts become tokens only for byte-level "
                f"configurations, whose bos is {BYTE_VALUES}"
            )
        return [config.bos, *self.data]


def load(kinds: Iterable[str] | None = None, folder: Path = FOLDER) -> list[Prompt]:
    """All prompts of `folder`, or those of some kinds, in the order of kind and file. Raises PromptError."""
    files = {path.stem: path for path in sorted(Path(folder).glob("*.json"))}
    if not files:
        raise PromptError(f"{folder}: no prompt files (*.json) here")
    wanted = list(files) if kinds is None else list(kinds)
    for kind in wanted:
        if kind not in files:
            raise PromptError(f"no prompts of kind {kind!r}; kinds are {', '.join(files)}")
    prompts, seen = [], {}
    for kind in wanted:
        for prompt in _read(files[kind]):
            if prompt.id in seen:
                raise PromptError(f"{files[kind]}: id {prompt.id!r} stands in {seen[prompt.id]} too; ids are unique")
            seen[prompt.id] = files[kind].name
            prompts.append(prompt)
    return prompts


def get(name: str, folder: Path = FOLDER) -> Prompt:
    """The prompt with this id, stored or built ("long-agent-32768-s0"). Raises PromptError with the ids of its kind."""
    if m := _LONG_ID.fullmatch(name):
        return long_context(m[1], int(m[2]), int(m[3]))
    prompts = load(folder=folder)
    for prompt in prompts:
        if prompt.id == name:
            return prompt
    near = [p.id for p in prompts if p.kind == name.split("-")[0]] or sorted({p.kind + "-…" for p in prompts})
    raise PromptError(f"no prompt {name!r}; there are {', '.join(near)}")


def long_context(kind: str, tokens: int, seed: int = 0) -> Prompt:
    """A context of exactly `tokens` tokens, bos included, for a byte-level configuration; the same for the same seed.

    kind: "retrieval" (needles in varied text), "agent" (a transcript with tool output), "repeat" (one block over and
    over, one copy altered). tokens: 4096..1048576. The needles' offsets, depths and answers come with it.
    """
    if kind not in BUILDERS:
        raise PromptError(f"no long context of kind {kind!r}; kinds are {', '.join(BUILDERS)}")
    if not isinstance(tokens, int) or not SHORTEST <= tokens <= LONGEST:
        raise PromptError(f"long context of {tokens} tokens; allowed are {SHORTEST}..{LONGEST}")
    if not isinstance(seed, int) or seed < 0:
        raise PromptError(f"long context with seed {seed}; allowed are whole numbers from 0")
    data, needles = BUILDERS[kind](tokens - 1, seed)
    return Prompt(f"long-{kind}-{tokens}-s{seed}", f"long-{kind}", data, _LONG_NOTES[kind], MAX_TOKENS, needles)


_LONG_NOTES = {
    "retrieval": "facts at stated depths; a wrong page, block table or split merge loses some of them",
    "agent": "a long transcript of tool output; state and cache must survive thousands of uneven tokens",
    "repeat": "near-collinear keys and equal attention scores; one altered copy tells a lost page from a repeated one",
}


def _read(path: Path) -> list[Prompt]:
    try:
        records = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_doubles)
    except UnicodeDecodeError as e:
        raise PromptError(f"{path}: byte {e.start} is not UTF-8; prompt files are UTF-8 JSON") from None
    except json.JSONDecodeError as e:
        raise PromptError(f"{path}: not JSON at line {e.lineno} column {e.colno}: {e.msg}") from None
    except OSError as e:
        raise PromptError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise PromptError(f"{path}: {e}") from None
    if not isinstance(records, list) or not records:
        raise PromptError(f"{path}: holds {_short(records)}; it must be a list of at least one record")
    return [_prompt(f"{path}: record {i}", path.stem, record) for i, record in enumerate(records)]


def _no_doubles(pairs: list[tuple]) -> dict:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise PromptError(f"field {key!r} stands twice in one record")
    return dict(pairs)


def _prompt(where: str, kind: str, record) -> Prompt:
    """One validated record; `where` opens the error message."""
    if not isinstance(record, dict):
        raise PromptError(f"{where} is {_short(record)}; it must be an object")
    for name, value in record.items():
        if name not in _FIELDS:
            raise PromptError(f"{where} has the unknown field {name!r}; fields are {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise PromptError(f"{where}: {name} is {_short(value)}; it must be {_words(_FIELDS[name])}")
    for name in _REQUIRED:
        if not record.get(name):
            raise PromptError(f"{where} has no {name!r}")
    if not _ID.fullmatch(record["id"]) or not record["id"].startswith(kind + "-"):
        raise PromptError(f"{where}: id is {record['id']!r}; it must be '{kind}-' and words of a-z, 0-9 with dashes")
    if record["kind"] != kind:
        raise PromptError(f"{where}: kind is {record['kind']!r}; this file holds {kind!r}")
    times, limit = record.get("times", 1), record.get("max_tokens", MAX_TOKENS)
    if times < 1 or limit < 1:
        raise PromptError(f"{where}: times = {times}, max_tokens = {limit}; both must be at least 1")
    data = _bytes(where, record)
    if len(data) * times >= LONGEST:
        raise PromptError(f"{where}: {len(data) * times} bytes; allowed are fewer than {LONGEST}")
    return Prompt(record["id"], kind, data * times, record["note"], limit)


def _bytes(where: str, record: dict) -> bytes:
    if ("text" in record) == ("base64" in record):
        raise PromptError(f"{where}: exactly one of 'text' and 'base64' must be there")
    if "base64" in record:
        try:
            return base64.b64decode(record["base64"], validate=True)
        except binascii.Error as e:
            raise PromptError(f"{where}: base64 does not decode: {e}") from None
    text = record["text"]
    for line in text if isinstance(text, list) else ():
        if not isinstance(line, str):
            raise PromptError(f"{where}: text holds {_short(line)}; its lines must be strings")
    try:
        return (text if isinstance(text, str) else "\n".join(text)).encode("utf-8")
    except UnicodeEncodeError as e:
        raise PromptError(f"{where}: text holds a lone surrogate at {e.start}; give such bytes as base64") from None


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _words(kinds) -> str:
    names = {str: "a string", int: "a whole number", list: "a list of lines"}
    return " or ".join(names[k] for k in (kinds if isinstance(kinds, tuple) else (kinds,)))

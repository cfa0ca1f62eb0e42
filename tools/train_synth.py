"""Generated training documents: retrieval, repeated tokens, JSON, sums, transcripts, other languages."""

import json
import random
import string

SHARES = {"needle": 0.4, "chat": 0.24, "json": 0.14, "sums": 0.1, "runs": 0.06, "languages": 0.06}

_FACTS = (
    ("key {k}: value {v}", "what is {k}? {v}"),
    ("{k} = {v}", "{k} = {v}"),
    ("Remember that the code of {k} is {v}.", "The code of {k} is {v}."),
    ("NOTE {k} -> {v}", "Q: {k}?\nA: {v}"),
    ("The number of {k} is {v}.", "What is the number of {k}? It is {v}."),
)
_NAMES = (
    "alder",
    "basin",
    "cinder",
    "delta",
    "ember",
    "fjord",
    "garnet",
    "harbor",
    "inlet",
    "juniper",
    "kettle",
    "lotus",
)
_ASK = ("Can you fix the bug in {f}?", "What does `{n}` do?", "Please add a test for {n}.", "Summarise this: {t}",
        "Why does {f} fail with code {d}?", "Rename {n} to {m} everywhere.",
        "How large is {n} after {d} steps?")  # fmt: skip
_SAY = ("I will read {f} first.", "The function `{n}` returns {d}.", "Done: {n} is now {m}, and {d} tests pass.", "{t}",
        "The error comes from {f}, line {d}. I change `{n}` and run the tests again.")  # fmt: skip
_TOOLS = ("read_file", "search", "run", "edit", "list_files")
_SENTENCES = (
    "Der Zug nach {n} fährt um {d} Uhr von Gleis {e} ab.", "Bitte öffnen Sie die Datei {n} und prüfen Sie Zeile {d}.",
    "Le fichier {n} contient {d} lignes, dont {e} sont vides.", "Nous arriverons à {n} vers {d} heures, après l’orage.",
    "El puerto de {n} tiene {d} barcos y {e} faros.", "¿Cuántos pasos faltan? Faltan {d}, y luego {e} más.",
    "文件 {n} 共有 {d} 行，其中 {e} 行为空。", "明天上午 {d} 点在 {n} 见面。", "駅から{n}まで{d}分かかります。",
    "{n}の番号は{d}で、鍵は{e}本あります。", "Файл {n} содержит {d} строк, из них {e} пустых.",
    "Поезд в {n} уходит в {d} часов.",
    "ملف {n} فيه {d} سطرا.", "{n} 파일에는 {d}개의 줄이 있습니다.", "Il porto di {n} dista {d} miglia.",
)  # fmt: skip


def _word(r: random.Random) -> str:
    shape = r.randrange(5)
    if shape == 0:
        return "".join(r.choices(string.ascii_uppercase, k=2)) + str(r.randrange(10, 100))
    if shape == 1:
        return f"{r.choice(_NAMES)}_{r.choice(_NAMES)}"
    if shape == 2:
        return "".join(r.choices(string.ascii_lowercase, k=r.randrange(4, 9)))
    return r.choice(_NAMES) + ("" if shape == 3 else f"-{r.randrange(1000)}")


def _value(r: random.Random) -> str:
    shape = r.randrange(4)
    if shape == 0:
        return "".join(r.choices("0123456789abcdef", k=r.randrange(4, 9)))
    if shape == 1:
        return f"{r.randrange(10000):04}-{r.choice(_NAMES).upper()}-{r.randrange(100):02}"
    return str(r.randrange(10 ** r.randrange(2, 7)))


def _fill(r: random.Random, filler: list[str], size: int) -> str:
    text = r.choice(filler)
    at = r.randrange(max(1, len(text) - size))
    return text[at : at + size]


def _template(r: random.Random, texts: tuple, filler: list[str]) -> str:
    values = {
        "f": f"src/{_word(r)}.py",
        "n": _word(r),
        "m": _word(r),
        "d": r.randrange(1, 400),
        "e": r.randrange(1, 40),
    }
    return r.choice(texts).format(**values, t=_fill(r, filler, 160).replace("\n", " "))


def needle(r: random.Random, filler: list[str]) -> str:
    told, asked = r.choice(_FACTS)
    facts = {_word(r): _value(r) for _ in range(r.choice((1, 1, 2, 3, 4, 8)))}
    size = int(60 * 2 ** r.uniform(0, 6.5))
    lines = (_fill(r, filler, size) + " ").splitlines() or [""]
    for k, v in facts.items():
        lines.insert(r.randrange(len(lines) + 1), told.format(k=k, v=v))
    order = r.sample(sorted(facts), len(facts))
    return "\n".join([*lines, "", *(asked.format(k=k, v=facts[k]) for k in order), ""])


def runs(r: random.Random, filler: list[str]) -> str:
    unit = r.choice((r.choice(string.printable), "ab", "=-", "0 ", "\n", " ", "the ", r.choice(_NAMES) + " "))
    most = 40 if len(unit) == 1 else 1500  # see train_corpus.LONGEST_RUN
    return _fill(r, filler, 80) + unit * r.randrange(20, most) + "\n" + _fill(r, filler, 80)


def _object(r: random.Random, depth: int):
    kind = r.randrange(7 if depth else 5)
    if kind < 2:
        return r.randrange(10 ** r.randrange(1, 6)) if kind else round(r.uniform(-100, 100), 2)
    if kind == 2:
        return r.choice((True, False, None))
    if kind < 5:
        return _word(r) if kind == 3 else f"{_word(r)} {_word(r)}"
    if kind == 5:
        return [_object(r, depth - 1) for _ in range(r.randrange(5))]
    return {_word(r): _object(r, depth - 1) for _ in range(r.randrange(1, 5))}


def json_(r: random.Random, filler: list[str]) -> str:
    rows = [{k: _object(r, 2) for k in r.sample(_NAMES, 4)} for _ in range(r.randrange(1, 9))]
    keys = list(rows[0])
    if r.randrange(2):  # records of one schema
        rows = [dict.fromkeys(keys) | {k: _object(r, 0) for k in keys} for _ in rows]
    if r.randrange(2):
        return "".join(json.dumps(row) + "\n" for row in rows)
    return json.dumps({"items": rows, "count": len(rows)}, indent=r.choice((None, 1, 2, 4))) + "\n"


def sums(r: random.Random, filler: list[str]) -> str:
    out, top = [], 10 ** r.randrange(1, 5)
    for _ in range(r.randrange(5, 40)):
        a, b = r.randrange(top), r.randrange(top)
        sign = r.choice("+-*")
        c = a + b if sign == "+" else a - b if sign == "-" else a * b
        out.append(r.choice(("{a} {s} {b} = {c}", "Q: {a} {s} {b}?\nA: {c}")).format(a=a, s=sign, b=b, c=c))
    return "\n".join(out) + "\n"


def chat(r: random.Random, filler: list[str]) -> str:
    user, model, tool = r.choice((("User: ", "Assistant: ", "Tool: "), ("user: ", "assistant: ", "tool: "),
                                  ("<|user|>\n", "<|assistant|>\n", "<|tool|>\n")))  # fmt: skip
    out = []
    for _ in range(r.randrange(1, 8)):
        out.append(user + _template(r, _ASK, filler))
        for _ in range(r.randrange(3)):
            call = {"tool": r.choice(_TOOLS), "arguments": {"path": f"src/{_word(r)}.py", "line": r.randrange(400)}}
            out += [model + json.dumps(call), tool + _fill(r, filler, r.randrange(20, 500))]
        out.append(model + _template(r, _SAY, filler))
    return "\n".join(out) + "\n"


def languages(r: random.Random, filler: list[str]) -> str:
    return "\n".join(_template(r, _SENTENCES, filler) for _ in range(r.randrange(3, 12))) + "\n"


MAKERS = {"needle": needle, "chat": chat, "json": json_, "sums": sums, "runs": runs, "languages": languages}


def documents(size: int, filler: list[str], seed: int) -> list[bytes]:
    """About `size` bytes of generated documents in random order; `filler` is text to hide things in."""
    r, docs = random.Random(seed), []
    for kind, share in SHARES.items():
        left = size * share
        while left > 0:
            docs.append(MAKERS[kind](r, filler).encode("utf-8", "replace"))
            left -= len(docs[-1])
    r.shuffle(docs)
    return docs

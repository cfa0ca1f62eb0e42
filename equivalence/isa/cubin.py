"""What a cubin says about a kernel's parameters, and its disassembly."""

import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from .program import Unreadable

# Attributes of an .nv.info section (the names nvdisasm prints) and their payload forms.
PARAM_CBANK, KPARAM_INFO = 0x0A, 0x17
SIZED = 0x04
INSTRUCTION = 16  # bytes


class ToolMissing(RuntimeError):
    """nvdisasm is not installed."""


@dataclass(frozen=True)
class Parameters:
    """Where a kernel's parameters lie in constant bank 0: first byte, and (offset, size) of each in bytes."""

    base: int
    spans: tuple[tuple[int, int], ...]

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(i for i, (_, size) in enumerate(self.spans) if size >= 8)

    def at(self, address: int) -> int | None:
        """The pointer parameter that owns a byte of constant bank 0, or None."""
        for i, (offset, size) in enumerate(self.spans):
            if size >= 8 and self.base + offset <= address < self.base + offset + size:
                return i
        return None


def section(cubin: bytes, name: str) -> bytes:
    """The bytes of an ELF section. Raises Unreadable if it is not there or the file is damaged."""
    try:
        magic, table, width, count, names = (
            cubin[:4],
            struct.unpack_from("<Q", cubin, 0x28)[0],
            *struct.unpack_from("<HHH", cubin, 0x3A),
        )
        if magic != b"\x7fELF":
            raise Unreadable(f"the cubin starts with {magic!r}; expected an ELF file")
        headers = [struct.unpack_from("<II4Q", cubin, table + i * width) for i in range(count)]
        strings = headers[names][4]
        for label, _, _, _, offset, size in headers:
            start = strings + label
            if cubin[start : cubin.index(b"\0", start)].decode() == name:
                return cubin[offset : offset + size]
    except (struct.error, ValueError, IndexError) as error:
        raise Unreadable(f"the cubin is cut short or damaged: {error}") from None
    raise Unreadable(f"the cubin has no section {name}")


def parameters(cubin: bytes, symbol: str) -> Parameters:
    """Read from section .nv.info.<symbol>. Raises Unreadable if the cubin does not say."""
    info, at = section(cubin, f".nv.info.{symbol}"), 0
    base, spans = None, {}
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        payload = info[at + 4 : at + 4 + size] if form == SIZED else b""
        at += 4 + len(payload)
        if attribute == PARAM_CBANK:
            base = struct.unpack_from("<IHH", payload)[1]
        elif attribute == KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", payload)
            spans[ordinal] = offset, flags >> 18
    if base is None or sorted(spans) != list(range(len(spans))):
        raise Unreadable(f"the cubin does not say where the parameters of {symbol} lie")
    return Parameters(base, tuple(spans[i] for i in range(len(spans))))


def nvdisasm() -> str:
    """The disassembler of the nvidia-cuda-nvdisasm package, else the one on PATH. Raises ToolMissing."""
    spec = find_spec("nvidia")
    for folder in map(Path, spec.submodule_search_locations if spec else ()):
        for tool in sorted(folder.glob("cu*/bin/nvdisasm")):
            return str(tool)
    if tool := shutil.which("nvdisasm"):
        return tool
    raise ToolMissing("nvdisasm is missing, so SASS cannot be checked: pip install nvidia-cuda-nvdisasm")


def _run(arguments: list[str], image: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        done = subprocess.run([nvdisasm(), *arguments, file.name], capture_output=True, text=True)
    if done.returncode:
        raise Unreadable(f"nvdisasm cannot read the code: {' '.join(done.stderr.split())}")
    return done.stdout


def disassemble(functions: list[tuple[bytes, str]], target: str) -> list[str]:
    """SASS of (cubin, symbol) pairs of one target.

    Starting nvdisasm takes half a second, so it reads all functions as one piece of code. It reads alone what needs
    the rest of its cubin: functions with line information, and those with jump tables.
    """
    codes = [section(cubin, f".text.{symbol}") for cubin, symbol in functions]
    lines = _run(["-b", target.replace("sm_", "SM")], b"".join(codes)).splitlines() if codes else []
    instructions = iter([line for line in lines if re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+\S", line)])
    out = []
    for (cubin, _), code in zip(functions, codes, strict=True):
        text = "\n".join(islice(instructions, len(code) // INSTRUCTION))
        tables = re.search(r"\b(?:BRX|JMX)U?\b", text)
        out.append(_run(["-c", "-g"], cubin) if tables or b"\0.debug_line\0" in cubin else text)
    return out

"""PTX text -> kernels: declarations, labels and instructions with resolved operands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .faults import UnknownInstruction
from .operands import Operand, Scope, parse_operand, split_operands

WIDTHS = {f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)}
WIDTHS |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "f32x2": 8, "pred": 1}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(?:version|target|address_size|file|loc)\b[^\n]*", re.M)
_TOKEN = re.compile(r"[{};\n]|::|:|[^{};:\n]+")
_LABEL = re.compile(r"[A-Za-z_$%][\w$]*")
_ENTRY = re.compile(r"((?:\.\w+\s+)*)\.entry\s+([\w$%.]+)\s*")
_VARIABLE = re.compile(
    r"^\s*(?:\.(?:visible|extern|common|weak)\s+)*\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$%]+)\s*(\[\s*\d*\s*\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAMETER = re.compile(r"^\s*\.param\s+\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s+)?)?([\w$%]+)\s*$")
_BYTES_PARAMETER = re.compile(r"^\s*\.param\s+\.align\s+(\d+)\s+\.b8\s+([\w$%]+)\s*\[\s*(\d+)\s*\]\s*$")
_REGISTERS = re.compile(r"^\.reg\s+\.(\w+)\s+(.*)$", re.S)
_GUARD = re.compile(r"^@(!?)([\w$%]+)\s+")


@dataclass(frozen=True)
class Variable:
    """A declared array: where it lives, how it is aligned, its bytes (0: dynamic), what it begins
    with."""

    space: str
    align: int
    num_bytes: int
    initial: tuple[int, ...] | None = None
    type: str = "b8"


@dataclass
class Instruction:
    opcode: str
    operands: list[Operand]
    line: int
    text: str
    guard: Operand | None = None
    is_guard_negated: bool = False
    head: str = ""

    def __post_init__(self) -> None:
        self.head = self.opcode.split(".", 1)[0]

    def unknown(self, what: str) -> UnknownInstruction:
        return UnknownInstruction(f"line {self.line}: {what}: {self.text}")


@dataclass
class Kernel:
    name: str
    parameters: dict[str, tuple[int, str]]  # name -> (offset, type)
    parameter_bytes: int
    variables: dict[str, Variable]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)  # unique name -> type
    max_threads: int | None = None


def parse(text: str) -> tuple[dict[str, Kernel], dict[str, Variable], str]:
    """The kernels, the module's variables and the target's name."""
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    text = _COMMENT.sub(_blank, text)
    text = _LINE_DIRECTIVE.sub("", text)
    kernels: dict[str, Kernel] = {}
    variables: dict[str, Variable] = {}
    position = 0
    while position < len(text):
        if text[position].isspace() or text[position] == ";":
            position += 1
        elif entry := _ENTRY.match(text, position):
            close = text.index(")", entry.end()) if text[entry.end() : entry.end() + 1] == "(" else entry.end()
            parameters = text[entry.end() + 1 : close]
            opening = text.index("{", close)
            end = _matching(text, opening)
            kernel = _kernel(entry.group(2), parameters, text[close + 1 : opening], variables)
            _body(kernel, text[opening + 1 : end], text.count("\n", 0, opening + 1) + 1)
            kernels[kernel.name] = kernel
            position = end + 1
        elif re.match(r"(?:\.\w+\s+)*\.(?:func|section)\b", text[position:]):
            # Only calls would reach it, and those are refused.
            stop, opening = text.find(";", position), text.find("{", position)
            position = stop + 1 if stop >= 0 and (opening < 0 or stop < opening) else _matching(text, opening) + 1
        else:
            stop = text.index(";", position)
            name, variable = _variable(text[position:stop], text.count("\n", 0, position) + 1)
            variables[name] = variable
            position = stop + 1
    return kernels, variables, target.group(1) if target else ""


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n") or " "


def _matching(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise UnknownInstruction("a brace is never closed")


def _variable(text: str, line: int) -> tuple[str, Variable]:
    match = _VARIABLE.match(text)
    if not match or match.group(3) not in WIDTHS:
        raise UnknownInstruction(f"line {line}: declaration: {text.strip()}")
    space, align, kind, name, brackets, initial = match.groups()
    width = WIDTHS[kind]
    count = int(brackets.strip("[] \t") or 0) if brackets else 1
    values = None
    if initial is not None:
        try:
            values = tuple(int(item, 0) for item in initial.strip("{} \n\t").split(","))
        except ValueError:
            raise UnknownInstruction(f"line {line}: initial values: {text.strip()[:120]}") from None
    return name, Variable(space, int(align or width), count * width, values, kind)


def _kernel(name: str, parameters: str, directives: str, variables: dict[str, Variable]) -> Kernel:
    places: dict[str, tuple[int, str]] = {}
    offset = 0
    for text in filter(str.strip, parameters.split(",")):
        if (match := _PARAMETER.match(text)) and match.group(1) in WIDTHS:
            kind, own = match.group(1), match.group(2)
            align = size = WIDTHS[kind]
        elif match := _BYTES_PARAMETER.match(text):
            own, kind = match.group(2), "b8"
            align, size = int(match.group(1)), int(match.group(3))
        else:
            raise UnknownInstruction(f"parameter of {name}: {text.strip()}")
        offset = -(-offset // align) * align
        places[own] = (offset, kind)
        offset += size
    kernel = Kernel(name, places, offset, dict(variables))
    for directive, values in re.findall(r"\.(\w+)\s*([\d,\s]*)", directives):
        if directive in ("maxntid", "reqntid"):
            kernel.max_threads = 1
            for value in values.split(","):
                kernel.max_threads *= int(value)
        elif directive not in ("minnctapersm", "maxnreg"):
            raise UnknownInstruction(f"directive of {name}: .{directive}")
    return kernel


def _body(kernel: Kernel, text: str, line: int) -> None:
    scopes: list[Scope] = [{}]
    pending, depth, start = "", 0, line
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
            pending += " " if pending else ""
        elif token == ";" and depth == 0:
            _statement(kernel, scopes, pending.strip(), start)
            pending = ""
        elif token == ":" and _LABEL.fullmatch(pending.strip()):
            if pending.strip() in kernel.labels:
                raise UnknownInstruction(f"line {line}: a second label {pending.strip()}")
            kernel.labels[pending.strip()] = len(kernel.instructions)
            pending = ""
        elif token == "{" and not pending:
            scopes.append({})
        elif token == "}" and not pending:
            if len(scopes) == 1:
                raise UnknownInstruction(f"line {line}: a brace was never opened")
            scopes.pop()
        elif pending or not token.isspace():
            start = start if pending else line
            depth += (token == "{") - (token == "}")
            pending += token
    if pending.strip():
        raise UnknownInstruction(f"line {line}: {pending.strip()}")


def _statement(kernel: Kernel, scopes: list[Scope], text: str, line: int) -> None:
    if not text or text.startswith(".pragma"):
        return
    if match := _REGISTERS.match(text):
        _declare(kernel, scopes, match.group(1), match.group(2), line)
        return
    if text.startswith((".local", ".shared")):
        name, variable = _variable(text, line)
        kernel.variables[name] = variable
        return
    if text.startswith("."):
        what = "a call's parameter" if text.startswith(".param") else "directive"
        raise UnknownInstruction(f"line {line}: {what}: {text}")
    guard, is_negated = None, False
    rest = text
    if match := _GUARD.match(rest):
        is_negated = match.group(1) == "!"
        guard = parse_operand(match.group(2), scopes, kernel, line)
        rest = rest[match.end() :]
    opcode, *operands = rest.split(None, 1)
    parsed = [parse_operand(item, scopes, kernel, line) for item in split_operands(operands[0] if operands else "")]
    kernel.instructions.append(Instruction(opcode, parsed, line, " ".join(text.split()), guard, is_negated))


def _declare(kernel: Kernel, scopes: list[Scope], kind: str, names: str, line: int) -> None:
    if kind not in WIDTHS:
        raise UnknownInstruction(f"line {line}: register type .{kind}")
    for item in names.split(","):
        name = item.strip()
        counted = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
        own = [f"{counted.group(1)}{i}" for i in range(int(counted.group(2)))] if counted else [name]
        for each in own:
            unique = each if each not in kernel.registers else f"{each}@{len(kernel.registers)}"
            scopes[-1][each] = unique
            kernel.registers[unique] = kind

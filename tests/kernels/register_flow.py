"""Finds what ptxas 12.8 silently does wrong with registers (docs/concepts/asynchrony.md): follows them through machine code.

Of two loops in a row over the same operand it makes code that reads uniform registers which nothing wrote. And what a loop's
matrix products hold in registers it may overwrite in the loop, as if nobody came round again.
"""

from __future__ import annotations

import re


def undefined_reads(code: str) -> list[str]:
    """The instructions of `nvdisasm -c` that read a uniform register which some way from the kernel's start leaves unwritten.

    What runs under a predicate is taken at its word: it writes what it may write, and reads nothing.
    """
    lines, ways = _flow(code)
    reads, writes = zip(*(_registers(line) for line in lines), strict=True)
    written: list[frozenset[int] | None] = [None] * len(lines)
    written[0] = frozenset()
    pending = [0]
    while pending:
        here = pending.pop()
        after = written[here] | writes[here]
        if (copy := re.fullmatch(r"UMOV UR(\d+), UR(\d+)", lines[here])) and int(copy[2]) not in written[here] | {63}:
            # half of a pair is often copied along and never used: a copy of nothing is nothing
            after -= {int(copy[1])}
        for there in ways[here]:
            before = after if written[there] is None else written[there] & after
            if before != written[there]:
                written[there] = before
                pending.append(there)
    return [
        line
        for line, read, known in zip(lines, reads, written, strict=True)
        if known is not None and read - known and not re.fullmatch(r"UMOV UR\d+, UR\d+", line)
    ]


def overwritten_operands(code: str) -> list[str]:
    """The matrix products of `nvdisasm -c` whose left side was loaded from shared memory, but not on every way."""
    lines, ways = _flow(code)
    come_from: list[list[int]] = [[] for _ in lines]
    for n, there in enumerate(ways):
        for m in there:
            come_from[m].append(n)
    writes = [_vector_writes(line) for line in lines]
    found = []
    for n, line in enumerate(lines):
        left = re.match(r"[HQI]GMMA\S* R\d+, R(\d+),", line)
        for register in range(int(left[1]), int(left[1]) + 4) if left else ():
            loaded = {lines[w].partition("LDSM")[1] != "" for w in _writers(register, n, lines, come_from, writes)}
            if len(loaded) > 1:
                found.append(line)
                break
    return found


def _writers(
    register: int, reader: int, lines: list[str], come_from: list[list[int]], writes: list[range]
) -> set[int]:  # fmt: skip
    """The instructions whose result a reader may find in a register."""
    found = set()
    seen: set[int] = set()
    pending = list(come_from[reader])
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        if register in writes[here]:
            found.add(here)
            if not _parts(lines[here])[0]:
                continue
        pending += come_from[here]
    return found


def _vector_writes(line: str) -> range:
    """Returns the registers, one word per thread, that an instruction writes."""
    _, name, operands = _parts(line)
    words = [word.strip() for word in operands.split(",")]
    first = next((word for word in words if not re.fullmatch(r"U?P\w+", word)), "")
    target = re.fullmatch(r"R(\d+)", first)
    if not target or name.startswith(("BRX", "BAR", "RET", "WARPSYNC", "NANOSLEEP")):
        return range(0)
    count = 4 if ".128" in name or re.match(r"LDSM.*\.4$", name) else 2 if re.search(r"\.64|WIDE|CS2R", name) else 1
    if tile := re.match(r"[HQI]GMMA\.64x(\d+)", name):
        count = int(tile[1]) // 2
    return range(int(target[1]), int(target[1]) + count)


def _flow(code: str) -> tuple[list[str], list[list[int]]]:
    """The instructions, and where each may go on."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    targets: list[list[str]] = []
    for text in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", text):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);(.*)", text):
            lines.append(instruction[1].strip())
            targets.append(re.findall(r"\.L_x_\d+", text))
    ways = []
    for n, line in enumerate(lines):
        predicate, name, operands = _parts(line)
        jumps = name.startswith(("BRA", "BRX"))
        ends = jumps or name.startswith(("EXIT", "RET"))
        # a branch may also hang on a predicate among its operands
        goes_on = not ends or predicate or re.match(r"!?U?P\d", operands)
        ways.append([labels[t] for t in targets[n] if jumps and t in labels] + [n + 1] * bool(goes_on and n + 1 < len(lines)))
    return lines, ways


def _parts(line: str) -> tuple[bool, str, str]:
    """Whether it has a predicate, its name, its operands."""
    predicate = re.match(r"@!?U?P\w+\s+", line)
    name, _, operands = line[predicate.end() if predicate else 0 :].partition(" ")
    return bool(predicate), name, operands


def _registers(line: str) -> tuple[frozenset[int], frozenset[int]]:
    """The uniform registers that an instruction reads, and those that it writes."""
    predicate, name, operands = _parts(line)
    pair = ".64" in name
    words = [word.strip() for word in operands.split(",")]
    # predicates that it writes come first
    first = next((n for n, word in enumerate(words) if not re.fullmatch(r"U?P\w+", word)), 0)
    writes: frozenset[int] = frozenset()
    uniform = name.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX")) and not name.startswith(("UTMA", "UBLK", "USETMAXREG"))
    if uniform and (found := re.fullmatch(r"UR(\d+)", words[first])):
        writes = frozenset(range(int(found[1]), int(found[1]) + 1 + (pair or "WIDE" in name)))
        del words[first]
    if (matrix := re.search(r"gdesc\[UR(\d+)\]", operands)) and re.match("[HQI]GMMA", name):
        # a group of four: where the left side is, unless it lies in registers, and where the right side is
        base = int(matrix[1]) + (0 if words[1].startswith("gdesc") else 2)
        return frozenset() if predicate else frozenset(range(base, int(matrix[1]) + 4)), frozenset()
    reads = {int(n) + more for word in words for n in re.findall(r"\bUR(\d+)\b", word) for more in range(1 + (pair and uniform))}
    return frozenset() if predicate else frozenset(reads - {63}), writes

"""Do all threads that a barrier or a simdgroup operation needs come by? Told from the tokens, on the safe side.

Every value has a level: how far it is the same. A barrier needs control flow that is the same in the threadgroup, an
operation of a simdgroup one that is the same in the simdgroup. What starts out different is a thread's index, its
lane and what an atomic gives; args, positions of threadgroups and what lies at an address that is the same are not.
So a kernel may leave early where its count, read from args or meta, says so; not where its own thread's work ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from functions import SAME, SIMDGROUP, THREAD, Function, functions
from lowering import SourceError, Token, Tokens, fault, match_angle, match_close
from signatures import Source

# What brings a simdgroup's values together; every other operation of a simdgroup gives each lane its own.
TOGETHER = {f"simd_{word}" for word in ("sum", "product", "max", "min", "or", "and", "xor", "any", "all", "ballot")}
TOGETHER |= {"simd_broadcast", "simd_broadcast_first"}
NOT_COLLECTIVE = {"simd_vote", "simd_lane", "simd_is_first", "simdgroup_matrix", "simdgroup_index_in_threadgroup"}
WHO = {SAME: "the threadgroup", SIMDGROUP: "a simdgroup"}
WORDS = {"if", "for", "while", "switch", "return", "sizeof", "else", "do"}


def needed(name: str, before: str) -> int:
    """The level that control flow must have where `name` is called."""
    if name == "threadgroup_barrier" or (name == "run" and before == "."):  # matmul2d's
        return SAME
    prefixes = ("simd_", "simdgroup_", "quad_")
    return SIMDGROUP if name.startswith(prefixes) and name not in NOT_COLLECTIVE else THREAD


@dataclass
class Control:
    """How far control flow is the same, and the condition that made it so."""

    level: int = SAME
    condition: Token | None = None

    def under(self, level: int, condition: Token | None) -> Control:
        return Control(level, condition) if level > self.level else self


@dataclass
class Flow:
    """One pass over a function's body after another, until the levels of its variables stand."""

    function: Function
    known: dict[str, list[Function]]
    levels: list[int]
    faults: list[SourceError] | None = None  # where the last pass puts them
    variables: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    loops: dict[int, Control] = field(default_factory=dict)  # by where they begin: how threads leave them early
    result: int = SAME
    output: int = SAME

    def settle(self, faults: list[SourceError] | None = None) -> Flow:
        self.shared = set(self.function.shared)
        self.variables = dict(zip(self.function.parameters, self.levels, strict=True))
        self.variables |= dict.fromkeys(self.function.members, self.levels[-1])
        while True:
            before = (dict(self.variables), {k: v.level for k, v in self.loops.items()}, self.result, self.output)
            self.walk()
            if before == (self.variables, {k: v.level for k, v in self.loops.items()}, self.result, self.output):
                break
        self.faults = faults
        self.walk()
        return self

    def walk(self) -> None:
        self.left = Control()  # how threads have left the function so far
        self.inside: list[int] = []  # loops
        self.scopes: list[dict[str, str]] = [{}]  # name -> key of `variables`
        self.block(self.function.body, Control())

    def block(self, tokens: Tokens, control: Control) -> None:
        self.scopes.append({})
        i = 0
        while i < len(tokens):
            i = self.statement(tokens, i, control)
        self.scopes.pop()

    def statement(self, tokens: Tokens, i: int, control: Control) -> int:
        """The statement at i; returns the index behind it."""
        control = control.under(self.left.level, self.left.condition)
        text = tokens[i].text
        if text == "{":
            end = match_close(tokens, i)
            self.block(tokens[i + 1 : end], control)
            return end + 1
        if text == "if":
            opening = i + 1 + (tokens[i + 1].text == "constexpr")
            close = match_close(tokens, opening)
            inner = self.condition(tokens[opening + 1 : close], control)
            end = self.statement(tokens, close + 1, inner)
            return self.statement(tokens, end + 1, inner) if end < len(tokens) and tokens[end].text == "else" else end
        if text in ("for", "while", "switch", "do"):
            return self.loop(tokens, i, control)
        if text in ("case", "default"):
            return next(k for k in range(i, len(tokens)) if tokens[k].text == ":") + 1
        end = i
        while end < len(tokens) and tokens[end].text != ";":
            end = match_close(tokens, end) + 1 if tokens[end].text in ("(", "[", "{") else end + 1
        part = tokens[i:end]
        if text == "return":
            self.expression(part[1:], control)
            self.result = max(self.result, self.level(part[1:]), control.level)
            self.left = self.left.under(control.level, control.condition)
        if text in ("return", "break", "continue"):
            for start in self.inside if text == "return" else self.inside[-1:]:
                self.loops[start] = self.loops[start].under(control.level, control.condition)
        elif part:
            self.declare(part)
            self.expression(part, control)
        return end + 1

    def declare(self, tokens: Tokens) -> None:
        """Opens the variables that the statement declares: behind a type, and behind commas."""
        i = 0
        while i < len(tokens) and (tokens[i].kind == "name" or tokens[i].text in ("::", "*", "&", "<")):
            followed = tokens[i + 1].text if i + 1 < len(tokens) else ";"
            if tokens[i].kind == "name" and i > 0 and followed in ("=", ";", "[", ",", "(", "{"):
                break
            i = self.bracket_end(tokens, i) + 1
        if i >= len(tokens) or tokens[i].kind != "name" or all(token.kind != "name" for token in tokens[:i]):
            return
        is_shared = bool({"device", "threadgroup", "constant"} & {token.text for token in tokens[:i]})
        for part in self.arguments(tokens[i:]):
            name = next((token for token in part if token.kind == "name"), part[0])
            key = f"{name.text} {id(name)}"
            self.scopes[-1][name.text] = key
            self.variables.setdefault(key, SAME)
            if is_shared:
                self.shared.add(key)

    def key(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def condition(self, tokens: Tokens, control: Control) -> Control:
        self.expression(tokens, control)
        return control.under(self.level(tokens), tokens[0] if tokens else None)

    def loop(self, tokens: Tokens, i: int, control: Control) -> int:
        """for, while, do and switch: what is left early by some is gone through by the others alone."""
        key = id(tokens[i])
        left = self.loops.setdefault(key, Control())
        control = control.under(left.level, left.condition)
        self.inside.append(key)
        self.scopes.append({})
        if tokens[i].text == "do":
            end = self.statement(tokens, i + 1, control)
            close = match_close(tokens, end + 1)
            inner = self.condition(tokens[end + 2 : close], control)
            self.loops[key] = self.loops[key].under(inner.level, inner.condition)
            end = close + 2
        else:
            close = match_close(tokens, i + 1)
            parts: list[Tokens] = [[]]
            for token in tokens[i + 2 : close]:
                if token.text == ";":
                    parts.append([])
                else:
                    parts[-1].append(token)
            if len(parts) == 3:
                self.declare(parts[0])
                self.expression(parts[0], control)
            inner = self.condition(parts[len(parts) // 2], control)
            end = self.statement(tokens, close + 1, inner)
            self.expression(parts[-1], inner)
        self.inside.pop()
        self.scopes.pop()
        return end

    # Expressions

    def level(self, tokens: Tokens) -> int:
        """The level of an expression's value."""
        highest, i = SAME, 0
        while i < len(tokens):
            token = tokens[i]
            before = tokens[i - 1].text if i > 0 else ""
            if token.kind == "name" and before != ".":
                opening = self.call_at(tokens, i)
                if opening:
                    close = match_close(tokens, opening)
                    highest = max(highest, self.call_level(token.text, tokens[opening + 1 : close]))
                    i = close
                else:
                    highest = max(highest, self.variables.get(self.key(token.text), SAME))
            elif token.kind == "name" and (opening := self.call_at(tokens, i)):
                highest = max(highest, *(f.result for f in self.known.get(token.text, [])), SAME)
            i += 1
        return highest

    def call_level(self, name: str, arguments: Tokens) -> int:
        inner = self.level(arguments)
        if name in TOGETHER:
            return min(inner, SIMDGROUP)
        if name in ("simd_lane", "simd_is_first") or name.startswith(("atomic_", "quad_")):
            return THREAD
        if name.startswith("simd_") and name not in NOT_COLLECTIVE:
            return THREAD if inner or "prefix" in name else SAME
        if name not in self.known:
            return inner
        return max(min(f.result, max(inner, f.own_result)) for f in self.known[name])

    @staticmethod
    def call_at(tokens: Tokens, i: int) -> int:
        """Index of the parenthesis of a call of the name at i, else 0."""
        if i + 1 < len(tokens) and tokens[i].text not in WORDS:
            if tokens[i + 1].text == "(":
                return i + 1
            if tokens[i + 1].text == "<" and tokens[i + 1].space == "":
                end = match_angle(tokens, i + 1) + 1
                if end < len(tokens) and tokens[end].text == "(":
                    return end
        return 0

    def expression(self, tokens: Tokens, control: Control) -> None:
        """Takes note of what a statement without inner statements calls and assigns."""
        for i, token in enumerate(tokens):
            if token.kind == "name" and (opening := self.call_at(tokens, i)):
                self.call(tokens, i, opening, control)
                if i > 0 and tokens[i - 1].kind == "name" and tokens[i - 1].text not in WORDS:  # uint x(y)
                    self.assign(tokens, i + 1, tokens[opening + 1 : match_close(tokens, opening)], control)
            elif self.is_assignment(tokens, i):
                self.assign(tokens, i, self.right_side(tokens, i + 1), control)
            elif token.text in "+-" and i > 0 and tokens[i - 1].text == token.text and token.space == "":
                neighbours = [k for k in (i - 2, i + 1) if 0 <= k < len(tokens) and tokens[k].kind == "name"]
                for k in neighbours:
                    self.raise_to(tokens[k].text, control.level)

    @staticmethod
    def is_assignment(tokens: Tokens, i: int) -> bool:
        if tokens[i].kind != "op" or i == 0:
            return False
        shifts = tokens[i].text in ("<=", ">=") and tokens[i - 1].text == tokens[i].text[0] and tokens[i].space == ""
        return tokens[i].text == "=" or shifts

    @staticmethod
    def bracket_end(tokens: Tokens, i: int) -> int:
        """Index of the last token of the bracket at i, else i; `<` without a space before it is a bracket."""
        if tokens[i].text in ("(", "[", "{"):
            return match_close(tokens, i)
        if tokens[i].text == "<" and tokens[i].space == "" and i > 0 and tokens[i - 1].kind == "name":
            return match_angle(tokens, i)
        return i

    @classmethod
    def right_side(cls, tokens: Tokens, i: int) -> Tokens:
        end = i
        while end < len(tokens) and tokens[end].text not in (",", ")", "]", "}"):
            end = cls.bracket_end(tokens, end) + 1
        return tokens[i:end]

    def raise_to(self, name: str, level: int) -> None:
        key = self.key(name)
        self.variables[key] = max(self.variables.get(key, SAME), level)
        outputs = {self.function.parameters[k] for k in self.function.outputs}
        if key in outputs or ("this" in outputs and key in self.function.members):
            self.output = max(self.output, level)

    def assign(self, tokens: Tokens, i: int, value: Tokens, control: Control) -> None:
        """`tokens[..i] = value`: raises the level of the variable on the left."""
        k = i - 1
        indices: Tokens = []
        while k > 0 and tokens[k].kind == "op" and tokens[k].text in "+-*/%&|^<>":
            k -= 1
        while k > 0 and (tokens[k].text == "]" or tokens[k - 1].text == "."):
            if tokens[k].text == "]":
                start = next(s for s in range(k, -1, -1) if tokens[s].text == "[" and match_close(tokens, s) == k)
                indices += tokens[start + 1 : k]
                k = start - 1
            else:
                k -= 2
        if k < 0 or tokens[k].kind != "name":
            return  # through a pointer that an expression gives
        through = indices or (k > 0 and tokens[k - 1].text == "*" and (k == 1 or tokens[k - 2].kind == "op"))
        if through and self.key(tokens[k].text) in self.shared:
            return  # memory of all threads: what lies at one address is the same for all
        self.raise_to(tokens[k].text, max(self.level(value), self.level(indices), control.level))

    def call(self, tokens: Tokens, i: int, opening: int, control: Control) -> None:
        name = tokens[i]
        before = tokens[i - 1].text if i > 0 else ""
        close = match_close(tokens, opening)
        arguments = self.arguments(tokens[opening + 1 : close])
        levels = [self.level(part) for part in arguments]
        owner = tokens[i - 2].text if before == "." and i > 1 else ""
        inner = self.short_circuits(tokens, i, control)
        self.check(name, needed(name.text, before), inner)
        for other in self.known.get(name.text, []):
            given = [
                *levels,
                *[SAME] * (len(other.parameters) - 1 - len(levels)),
                self.variables.get(self.key(owner), SAME),
            ]
            if len(given) != len(other.parameters):
                continue  # another overload
            if self.levels is self.function.levels:
                other.levels = [max(pair) for pair in zip(other.levels, given, strict=True)]
            self.check(name, other.need, inner)
            for k in other.outputs:
                target = [Token("name", owner, "", "", 0)] if k + 1 == len(other.parameters) else []
                target = target or (arguments[k] if k < len(arguments) else [])
                base = next((token.text for token in target if token.kind == "name"), "")
                if base:
                    self.raise_to(base, max(*given, other.own_output, control.level))

    @classmethod
    def arguments(cls, tokens: Tokens) -> list[Tokens]:
        """Split at commas outside of brackets."""
        parts: list[Tokens] = [[]]
        i = 0
        while i < len(tokens):
            end = cls.bracket_end(tokens, i)
            if tokens[i].text == ",":
                parts.append([])
            else:
                parts[-1] += tokens[i : end + 1]
            i = end + 1
        return [part for part in parts if part]

    def short_circuits(self, tokens: Tokens, i: int, control: Control) -> Control:
        """Control flow at token i of an expression: behind `a ?`, `a &&` and `a ||` not all threads come by."""
        last, depth, ended = -1, 0, False
        for k in range(i - 1, -1, -1):
            text = tokens[k].text if tokens[k].kind == "op" else ""
            depth += (text in (")", "]", "}")) - (text in ("(", "[", "{"))
            if depth > 0:
                continue
            if (depth < 0 or text in (",", "=")) and last >= 0:
                control = control.under(self.level(tokens[k + 1 : last]), tokens[last])
                last = -1
            ended = depth == 0 and (ended or text in (",", "="))  # what lies left of a comma does not count
            if text in ("?", "&&", "||") and last < 0 and not ended:
                last = k
            depth = max(depth, 0)
        return control.under(self.level(tokens[:last]), tokens[last]) if last >= 0 else control

    def check(self, name: Token, need: int, control: Control) -> None:
        self.function.need = min(self.function.need, need)
        if self.faults is not None and control.level > need:
            where = f" in line {control.condition.line}" if control.condition else ""
            message = f"expected {name.text} where all threads of {WHO[need]} come by"
            self.faults.append(fault(name, f"{message}, got it behind the condition{where}, not the same in all"))


def check_uniformity(source: Source) -> list[SourceError]:
    """Barriers and simdgroup operations that some threads of a kernel may not reach."""
    known: dict[str, list[Function]] = {}
    kernels = []
    for part in source.declarations:
        if part.kind == "instantiation":
            continue
        tokens = [token for token in part.tokens if token.kind != "mark"]
        for function in functions(tokens):
            known.setdefault(function.name, []).append(function)
            if part.kind == "kernel":
                kernels.append(function)
    every = [function for same in known.values() for function in same]
    while True:
        before = [(list(f.levels), f.need, f.result, f.own_result, f.own_output) for f in every]
        for function in every:
            flow = Flow(function, known, [SAME] * len(function.parameters)).settle()
            function.own_result, function.own_output = flow.result, flow.output
            function.result = Flow(function, known, function.levels).settle().result
        if before == [(list(f.levels), f.need, f.result, f.own_result, f.own_output) for f in every]:
            break
    faults: list[SourceError] = []
    for function in every:
        Flow(function, known, function.levels).settle(faults)
    return faults

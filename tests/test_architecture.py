"""The rules of the design, checked on the source of the package: who imports whom, and what is never written."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import outpace

PACKAGE = Path(outpace.__file__).parent

# A file imports only from its own line or the lines above.
LINES: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "heap", "log", "process_wide", "structured", "types", "config", "tree", "turns", "profile"),
    ("kernels",),
    ("parallel", "quant", "cache", "sampling", "tokenizer"),
    ("inject", "offload"),
    ("loading",),
    (
        "runner",
        "prefixes",
        "sequence",
        "shares",
        "step_plan",
        "step_sizes",
        "scheduler",
        "prepare",
        "load_paged",
        "ranks",
    ),
    ("generation", "engine", "answers", "llm_engine", "llm", "ragged"),
    ("api", "bench", "deploy", "mii", "replicas", "server", "cli", "metrics", "quality", "verify", "__main__"),
)
RANK: Mapping[str, int] = {part: rank for rank, parts in enumerate(LINES) for part in parts}
ONLY: Mapping[str, tuple[str, ...]] = {
    "scheduler": (
        *("errors", "log", "types", "cache.block_pool", "cache.tiers"),
        *("prefixes", "sequence", "shares", "step_plan", "step_sizes"),
    ),
    "prefixes": ("types", "cache.block_pool", "cache.tiers", "sequence", "step_plan"),
    "sequence": ("types",),
    "shares": ("sequence",),
    "step_plan": ("types", "cache.tiers", "sequence"),
    "step_sizes": ("errors", "sequence"),
}
"""Parts that may import only these parts of the package, whatever their line."""
NO_TORCH = (
    "structured.outputs",
    "types",
    "prefixes",
    "sequence",
    "shares",
    "step_plan",
    "step_sizes",
    "scheduler",
    "cache.block_pool",
    "cache.tiers",
    "errors",
    "log",
)
GUESSES = ("loading", "inject")
"""Folders at the border with other people's models, where hasattr and getattr with a default may be used."""

REPEATED_CLASSES = frozenset(
    {"Batch", "Call", "Chooser", "Clock", "Ended", "Experiment", "Experts", "Frames", "Group", "Header"}
    | {"Held", "Item", "Kind", "Layout", "Loaded", "Numbers", "Pages", "Parts", "Piece", "Ping", "Plan"}
    | {"Refused", "Replica", "Request", "Response", "Router", "Run", "Server", "Settings", "Source"}
    | {"Target", "Trace", "Usage", "Wanted", "Way", "Written"}
)
"""Names of classes that stand in several files. A new one is refused, and so is one that is used once by now."""
REPEATED_FILES = frozenset(
    {"app", "asked", "chat", "copies", "engine", "experts", "gptq", "llm", "merge", "messages", "mii"}
    | {"numbers", "options", "picture", "pipeline", "plan", "plot", "probe", "problems", "quantize"}
    | {"ragged", "ranks", "report", "results", "rules", "run", "serve", "shard", "stored", "stream", "text"}
    | {"vocabulary"}
)
"""Names of files that stand in several folders: the same."""

Checker = Callable[[str, ast.Module], Iterator[str]]


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names of every module that is imported, at the top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _own(name: str, *parts: str) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def import_order(module: str, tree: ast.Module) -> Iterator[str]:
    """Imports against the order. The package's own __init__ names everything and is left out."""
    if not module:
        return
    part = module.partition(".")[0]
    if part not in RANK:
        yield f"{module}: {part} has no place in LINES"
        return
    for name in imports(tree):
        root, _, target = name.partition(".")
        if root != "outpace":
            continue
        other = target.partition(".")[0]
        allowed = ONLY.get(part)
        if allowed is not None and not _own(target, *allowed):
            yield f"{module} imports {target}"
        elif RANK.get(other, -1 if other in ("", "__version__") else 99) > RANK[part]:
            yield f"{module} imports {target}, which stands below it"


def only_main_imports_cli(module: str, tree: ast.Module) -> Iterator[str]:
    """The command line imported by anything but itself and `__main__`."""
    if module and not _own(module, "cli", "__main__"):
        yield from (f"{module} imports {name}" for name in imports(tree) if _own(name, "outpace.cli"))


def no_torch(module: str, tree: ast.Module) -> Iterator[str]:
    """Torch in parts that are pure Python."""
    if _own(module, *NO_TORCH):
        yield from (f"{module} imports {name}" for name in imports(tree) if _own(name, "torch", "transformers"))


def no_star(module: str, tree: ast.Module) -> Iterator[str]:
    """`from x import *`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names):
            yield f"{module}:{node.lineno} imports *"


MUTABLE = ("list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "bytearray")


def no_globals(module: str, tree: ast.Module) -> Iterator[str]:
    """Containers at the top of a module that are not constants, and `global`."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in targets:
            if _is_mutable(value) and isinstance(target, ast.Name) and not _is_constant(target.id):
                yield f"{module}:{node.lineno} {target.id} is a container that is not a constant"
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            yield f"{module}:{inner.lineno} global {', '.join(inner.names)}"


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = (
            value.func.attr
            if isinstance(value.func, ast.Attribute)
            else value.func.id
            if isinstance(value.func, ast.Name)
            else ""
        )
        return name in MUTABLE
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _is_constant(name: str) -> bool:
    return name == "__all__" or name.upper() == name


def constants_stay(module: str, tree: ast.Module) -> Iterator[str]:
    """Functions that change a constant of their module: NAME[...] = ..., NAME.append(...)."""
    changes = (
        "append",
        "add",
        "update",
        "pop",
        "clear",
        "extend",
        "insert",
        "remove",
        "setdefault",
        "popitem",
        "discard",
    )
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            owner: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changes:
                owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id.isupper():
                yield f"{module}:{node.lineno} changes {owner.id}"  # type: ignore[attr-defined]


def no_guesses(module: str, tree: ast.Module) -> Iterator[str]:
    """hasattr, and getattr with a default, outside the border folders."""
    if _own(module, *GUESSES):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) > 2):
            yield f"{module}:{node.lineno} {node.func.id}"


def no_print(module: str, tree: ast.Module) -> Iterator[str]:
    """print(...): text for people goes through a rich console or typer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module}:{node.lineno} print"


def docstrings(module: str, tree: ast.Module) -> Iterator[str]:
    """Modules without a docstring; one without code needs none, nor does the one line that tools rewrite."""
    if tree.body and ast.get_docstring(tree) is None and module != "_version":
        yield f"{module or 'outpace'} has no docstring"


def return_types(module: str, tree: ast.Module) -> Iterator[str]:
    """Functions without a return type. Triton's kernels return nothing and are compiled from their source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None and not _is_kernel(node):
            yield f"{module}:{node.lineno} {node.name} has no return type"


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def sources() -> dict[str, ast.Module]:
    """Every module of the package, by dotted name without `outpace.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


# Each rule, with a module and a source that breaks it and one that does not.
RULES: dict[str, tuple[Checker, tuple[str, str], tuple[str, str]]] = {
    "import order": (
        import_order,
        ("kernels.norm", "def f() -> None:\n    from outpace.engine import InferenceEngine"),
        ("engine", "from outpace.kernels import norm\nfrom outpace.llm import LLM\nimport torch"),
    ),
    "import order of whole modules": (
        import_order,
        ("types", "import outpace.kernels"),
        ("cli", "import outpace.kernels"),
    ),
    "a part without a place": (import_order, ("novel", ""), ("api", "")),
    "an unknown part imported": (
        import_order,
        ("cli", "from outpace import novel"),
        ("cli", "from outpace import api"),
    ),
    "the scheduler's imports": (
        import_order,
        ("scheduler", "from outpace.config import InferenceConfig"),
        ("scheduler", "from outpace.cache.block_pool import BlockPool\nfrom outpace.types import Step"),
    ),
    "nobody imports the command line": (
        only_main_imports_cli,
        ("server.from_stdin", "def f() -> None:\n    from outpace.cli.serve import options_of"),
        ("cli.deploy", "from outpace.cli import serve"),
    ),
    "no torch": (no_torch, ("types", "from torch import nn"), ("tree", "import torch")),
    "no torch in the block pool": (no_torch, ("cache.block_pool", "import torch"), ("cache.kv_cache", "import torch")),
    "no import *": (no_star, ("a", "from b import *"), ("a", "from b import c")),
    "no container globals": (
        no_globals,
        ("a", "cache = {}"),
        ("a", "CACHE = {}\n_TABLE = [1]\n__all__ = []\nx = (1,)"),
    ),
    "no annotated container globals": (no_globals, ("a", "seen: set[int] = set()"), ("a", "SEEN: set[int] = set()")),
    "no constructed container globals": (no_globals, ("a", "x = collections.defaultdict(list)"), ("a", "x = Path()")),
    "no global statement": (no_globals, ("a", "def f() -> None:\n    global X\n    X = 1"), ("a", "X = 1")),
    "constants stay": (
        constants_stay,
        ("a", "def f() -> None:\n    TABLE[1] = 2"),
        ("a", "def f(t: T) -> None:\n    t[1] = TABLE[2]"),
    ),
    "constants are not added to": (
        constants_stay,
        ("a", "def f() -> None:\n    SEEN.add(2)"),
        ("a", "def f(s: S) -> None:\n    s.add(2)"),
    ),
    "no hasattr": (no_guesses, ("engine", "hasattr(x, 'y')"), ("loading.inspect", "hasattr(x, 'y')")),
    "no getattr with a default": (no_guesses, ("llm", "getattr(x, 'y', None)"), ("llm", "getattr(x, 'y')")),
    "no print": (no_print, ("a", "print(3)"), ("a", "console.print(3)")),
    "docstrings": (docstrings, ("a", "import torch"), ("a", '"""What it is."""')),
    "return types": (
        return_types,
        ("a", "class A:\n    async def f(self): ..."),
        ("a", "def f() -> int: ...\n@triton.jit\ndef kernel(x): ..."),
    ),
}
CHECKERS: Mapping[str, Checker] = {checker.__name__: checker for checker, _, _ in RULES.values()}


@pytest.fixture(scope="module")
def package() -> dict[str, ast.Module]:
    return sources()


@pytest.mark.parametrize("name", CHECKERS)
def test_the_package_keeps_the_rule(name: str, package: dict[str, ast.Module]) -> None:
    assert len(package) > 20
    assert [problem for module, tree in package.items() for problem in CHECKERS[name](module, tree)] == []


@pytest.mark.parametrize("name", RULES)
def test_the_rule_catches_what_breaks_it_and_nothing_else(name: str) -> None:
    checker, (wrong_module, wrong), (right_module, right) = RULES[name]
    assert len(list(checker(wrong_module, ast.parse(wrong)))) == 1
    assert list(checker(right_module, ast.parse(right))) == []


def test_every_part_of_the_package_has_its_place(package: dict[str, ast.Module]) -> None:
    assert {module.partition(".")[0] for module in package if module} <= RANK.keys()


def test_a_class_name_stands_in_one_file(package: dict[str, ast.Module]) -> None:
    places: dict[str, list[str]] = {}
    for module, tree in package.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    repeated = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert {name: modules for name, modules in repeated.items() if name not in REPEATED_CLASSES} == {}
    assert set(repeated) == REPEATED_CLASSES


def test_a_file_name_stands_in_one_folder() -> None:
    names = Counter(path.stem for path in PACKAGE.rglob("*.py"))
    assert {name for name, count in names.items() if count > 1} == REPEATED_FILES | {"__init__"}

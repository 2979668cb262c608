"""Who may import whom: imports go strictly down, and a few things have only one home.

The imports are read with `ast`, function-local ones and those under TYPE_CHECKING too: an import that is hidden
in a function still ties two files together.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from each import each

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))

LEVELS: tuple[tuple[str, ...], ...] = (
    ("torch_private",),
    ("errors", "types", "seeds", "sealed", "blocks", "cost", "functions"),
    ("table", "urls", "call", "deferred_init", "optimizer", "embedding"),
    ("config",),
    ("world",),
    ("compress", "report", "partition", "clock", "aggregate", "balance"),
    ("data", "tensor", "pipeline", "server"),
    ("exchange",),
    ("checkpoint",),
    ("plan", "recipe"),
    ("train",),
    ("cluster", "testing", "dashboard"),
    ("selftest", "doctor", "chaos", "jobs"),
    ("cli",),
)
"""Lowest first. A part may import lower levels and itself, never a neighbour on its own level."""

INNER_LEVELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "world": (("*",), ("shm",), ("network",), ("two_level",), ("world",), ("mesh",)),
    "tensor": (("*",), ("search",), ("__init__",)),
    "server": (
        ("protocol",),
        ("transport", "ledger", "rows"),
        ("dense",),
        ("client",),
        ("replication",),
        ("node",),
        ("processes",),
        ("discovery",),
    ),
    "exchange": (
        ("local_tensor", "row_tables", "facts", "frozen"),
        ("contract",),
        ("setup",),
        ("reduce",),
        ("buckets",),
        ("fsdp", "periodic", "ps_worker", "embeddings"),
        ("*",),
        ("__init__",),
    ),
    "checkpoint": (("layout",), ("folder",), ("load", "verify"), ("copies", "convert", "*")),
    "train": (("technique",), ("model",), ("run_config",), ("balancing",), ("*",)),
}
"""The same inside a folder that has folders: `*` stands for its single files that are not named, among which only
cycles are forbidden. Copies of checkpoints and what saves them go together, so that they share a level."""

SEEN_BY = {
    "exchange": {"server": {"client", "protocol", "discovery", "rows", "transport"}},
    "recipe": {"exchange": {"contract", "facts", "local_tensor"}},
    "train": {"exchange": {"contract", "setup", "__init__", "local_tensor", "row_tables", "frozen"}},
}
"""Which rooms of a lower folder a higher one may enter, where that is not all of them."""

ALLOWED = {
    "exchange/solo.py": "the reference keeps the rows of a SparseEmbedding in its own process",
    "train/server_setup.py": "reads the options of ps before the exchange is made",
    "train/build.py": "the only file that knows every slot",
}
"""Files that look further than SEEN_BY, and why."""

LEVEL = {part: height for height, parts in enumerate(LEVELS) for part in parts}

FACE = ("__init__", "__main__")
"""The package itself: it names what the public face is made of, so it is above everything."""

RANK_VARIABLE = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SHOAL_\w+)$"
)


def part_of(file: Path) -> str:
    """The folder of `src/shoal` a file is in, or its own name at the top."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, names taken out of packages included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def test_every_part_has_a_level() -> None:
    parts = {part_of(file) for file in FILES} - set(FACE)
    assert parts == set(LEVEL), (
        "a new folder or file at the top: give it a level in LEVELS, and say so in the docs"
    )


def test_the_levels_are_those_that_people_read() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    drawn = text.partition("```text\n")[2].partition("```")[0].splitlines()
    assert [tuple(line.split()) for line in reversed(drawn)] == list(LEVELS)


@each(FILES)
def test_imports_go_down(file: Path) -> None:
    mine = part_of(file)
    if mine in FACE:
        return
    for line, name in imports_of(tree_of(file)):
        package, _, rest = name.partition(".")
        theirs = rest.partition(".")[0]
        if package != "shoal" or theirs == mine:
            continue
        if not theirs:  # the package itself is above everything; only its version is a plain fact
            assert uses_of(tree_of(file), "shoal") <= {"__version__"}, f"{name_of(file)}:{line} uses the face"
            continue
        assert theirs in LEVEL, f"{name_of(file)}:{line} imports {name}, which has no level"
        assert LEVEL[theirs] < LEVEL[mine], (
            f"{name_of(file)}:{line}: {mine} may not import {theirs}, which is not below it"
        )


def uses_of(tree: ast.Module, name: str) -> set[str]:
    """The attributes of `name` that a module uses."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == name}


def file_of(name: str) -> Path | None:
    """The file behind a dotted name; a package's is its __init__."""
    steps = name.split(".")[1:]
    while steps:
        target = SOURCE.joinpath(*steps)
        if target.with_suffix(".py").exists():
            return target.with_suffix(".py")
        if (target / "__init__.py").exists():
            return target / "__init__.py"
        steps.pop()
    return None


def room_of(file: Path) -> str:
    """The folder inside its part that a file is in, or its own name."""
    return file.relative_to(SOURCE / part_of(file)).parts[0].removesuffix(".py")


@each([f for f in FILES if part_of(f) in INNER_LEVELS])
def test_imports_inside_a_folder_go_down(file: Path) -> None:
    part = part_of(file)
    levels = {room: height for height, rooms in enumerate(INNER_LEVELS[part]) for room in rooms}
    others = levels.get("*", -1)
    mine = room_of(file)
    for line, name in imports_of(tree_of(file)):
        target = file_of(name)
        if target is None or part_of(target) != part or room_of(target) == mine:
            continue
        theirs = room_of(target)
        high, low = levels.get(mine, others), levels.get(theirs, others)
        within = high == low == others  # single files: the test of cycles is enough
        assert low < high or within, f"{name_of(file)}:{line}: {part}/{mine} may not import {part}/{theirs}"


@each([f for f in FILES if part_of(f) in SEEN_BY])
def test_a_folder_enters_only_the_rooms_it_may(file: Path) -> None:
    if name_of(file) in ALLOWED:
        return
    for line, name in imports_of(tree_of(file)):
        target = file_of(name)
        rooms = SEEN_BY[part_of(file)].get(part_of(target)) if target else None
        assert target is None or rooms is None or room_of(target) in rooms, (
            f"{name_of(file)}:{line} enters {name}"
        )


LATE = {
    # `auto(int8)` looks its candidate up, when it is used, in the table that lists `auto` itself.
    ("compress/auto.py", "compress/__init__.py"),
}
"""Imports inside a function that close a cycle on purpose."""


def test_no_two_files_import_each_other() -> None:
    """Cycles through a package's __init__ count: importing a file runs the __init__ of every folder above it."""
    graph: dict[Path, set[Path]] = {}
    for file in FILES:
        named = {target for _, name in imports_of(tree_of(file)) if (target := file_of(name)) is not None}
        above = {
            folder / "__init__.py"
            for target in named
            for folder in target.parents
            if SOURCE in folder.parents and folder not in file.parents
        }
        graph[file] = {target for target in named | above if (name_of(file), name_of(target)) not in LATE} - {
            file
        }
    done: set[Path] = set()

    def visit(file: Path, path: tuple[Path, ...]) -> None:
        assert file not in path, "a cycle: " + " -> ".join(name_of(f) for f in (*path, file))
        if file not in done:
            for target in graph[file]:
                visit(target, (*path, file))
            done.add(file)

    for file in FILES:
        visit(file, ())


def environment_reads(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Rank variables that a module reads: os.environ["X"], os.environ.get("X"), os.getenv("X"), "X" in os.environ."""
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environment(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            reads = node.func.attr in ("get", "setdefault", "pop") and _is_environment(node.func.value)
            if reads or node.func.attr == "getenv":
                key = node.args[0]
        elif isinstance(node, ast.Compare) and any(_is_environment(side) for side in node.comparators):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and RANK_VARIABLE.match(key.value):
            yield node.lineno, key.value


def _is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


@each([f for f in FILES if part_of(f) != "world"])
def test_only_world_reads_rank_variables(file: Path) -> None:
    found = list(environment_reads(tree_of(file)))
    assert not found, f"{name_of(file)} reads {found}; ask shoal.world.launch instead"


UNPICKLES = {"cluster/by_value.py", "cluster/from_function.py"}
"""`shoal.launch`: a program and its own children, through files of a private folder."""


@pytest.mark.parametrize(
    "file", [f for f in FILES if part_of(f) != "testing" and name_of(f) not in UNPICKLES], ids=name_of
)
def test_nothing_is_unpickled(file: Path) -> None:
    """Loading a pickle runs code. Only tests and `shoal.launch`, which talk to their own children, may."""
    unsafe = ("pickle", "dill", "cloudpickle", "shelve", "marshal")
    tree = tree_of(file)
    for line, name in imports_of(tree):
        assert name.partition(".")[0] not in unsafe, f"{name_of(file)}:{line} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            call = f"{node.value.id}.{node.attr}"
            assert call not in ("torch.load", "torch.save"), f"{name_of(file)}:{node.lineno} calls {call}"


MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MAKERS = ("dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict", "WeakValueDictionary")


@each(FILES)
def test_no_global_state(file: Path) -> None:
    """A dict or list at the top of a module is a table, written in capitals and never changed."""
    for node in tree_of(file).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in MAKERS
        if not isinstance(value, MUTABLE) and not called:
            continue
        for target in targets:
            if not isinstance(target, ast.Name):
                continue  # an attribute of something else, such as the argtypes of a C function
            name = target.id
            fixed = not called and (name.lstrip("_").isupper() or name == "__all__")
            assert fixed, f"{name_of(file)}:{node.lineno}: {name} is global state; pass it instead"


@each(FILES)
def test_no_global_statement(file: Path) -> None:
    lines = [node.lineno for node in ast.walk(tree_of(file)) if isinstance(node, ast.Global)]
    assert not lines, f"{name_of(file)}: `global` at lines {lines}"


def test_tables_in_capitals_are_not_changed() -> None:
    """No module writes into a name in capitals, its own or another's."""
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                name = ast.unparse(node.value).rpartition(".")[2]
                assert not name.strip("_").isupper(), f"{name_of(file)}:{node.lineno} changes {name}"


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert not [name_of(file) for file in FILES if vague & {*file.relative_to(SOURCE).with_suffix("").parts}]

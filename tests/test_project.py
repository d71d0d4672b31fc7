"""The project as a whole: public names, documented paths, the order of rooms, and what an import costs.

Covers `_jax.py`, `_lazy.py`, `_version.py`, `config/maintenance.py`, `config/persistent.py` and `config/wrappers.py`.
"""

from __future__ import annotations

import ast
import compileall
import functools
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import ejkernel
import ejkernel.ops

PACKAGE = Path(ejkernel.__file__).parent
OPS = PACKAGE / "ops"
FILES = sorted(OPS.rglob("*.py"))

# Each room may import from those before it.
ROOMS = ("core", "timing", "tuning", "store", "fleet", "config", "execution", "programs", "reporting")
# Files beside the rooms. Whatever they need is in the first room.
BESIDE = ("_jax", "_lazy", "_version", "registry", "settings")

# Users rely on these. Taking one away breaks them; adding one is a promise.
PUBLIC = [
    # core
    *("Kernel", "Invocation", "Cfg", "Out", "FwdParams", "BwdParams", "OpsError", "Finding", "Record", "Trial"),
    *("device_fingerprint", "device_kind", "get_device_platform", "target_device"),
    *("abstractify", "sharding_fingerprint", "short_hash", "stable_json", "to_json", "from_json"),
    # caches
    *("ConfigCache", "overlay_cache", "current_scope", "refresh", "PersistentCache", "OperationStores"),
    *("RemoteStore", "RemoteWarning"),
    # selection
    *("AutotunePolicy", "policy_override", "forward_autotune_only", "ConfigSelectorChain", "Tuner"),
    *("Isolation", "forget_crashes", "counters", "Counters"),
    # search
    *("Strategy", "Space", "GuidedSearch", "RandomSearch"),
    # registry
    *("record_invocation", "get_invocations"),
    # execution
    *("default_executor", "default_selector", "tunable"),
    *("Executor", "ConfigChooser", "vmap_with_config", "pmap_with_config"),
    *("label", "extract_labels_from_hlo_text", "find_labels_in_lowered", "labels_to_configs"),
    *("Measurement", "AutotuneData", "Entry", "AutotuningResult"),
    *("autotune", "AutotuneOptions", "autotune_recorded", "autotune_lowered", "benchmark", "check"),
    # shipping
    *("freeze", "locked", "calls_made", "explain", "Explanation", "make_pack", "merge_packs", "verify_pack"),
    # seeing
    *("report", "attribute", "Attribution"),
    # more than one process
    *("agreement_report", "AgreementReport", "Agreed"),
    # many processes tune
    *("LocalPool", "RayPool", "SlurmPool"),
]

DOCUMENTED = {
    "ejkernel.ops.core": "Kernel Invocation",
    "ejkernel.ops.config.cache": "ConfigCache overlay_cache _cache_overlay",
    "ejkernel.ops.config.persistent": "PersistentCache",
    "ejkernel.ops.store.persistent": "PersistentCache",
    "ejkernel.ops.config.selection": ("AutotunePolicy ConfigSelectorChain Tuner forward_autotune_only policy_override"),
    "ejkernel.ops.registry": "record_invocation get_invocations",
    "ejkernel.ops.execution.executor": "Executor ConfigChooser",
}


def python(code: str, *, path: Path = PACKAGE.parent, cwd: Path | None = None) -> str:
    """What a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def named(path: Path) -> str:
    """A file of the package as a module's name inside `ejkernel.ops`."""
    parts = path.relative_to(OPS).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it, with every name that might be a module itself."""
    return imported(path.read_text(encoding="utf-8"), ["ejkernel", "ops", *path.relative_to(OPS).parent.parts])


def imported(source: str, package: list[str]) -> set[str]:
    """The same for a text, as a file of a package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = [*start, *(node.module or "").split(".")] if node.module else start
            found |= {".".join([*module, alias.name]) for alias in node.names}
    return found


def inside(module: str) -> str | None:
    """The room, or the file beside the rooms, that a module of `ejkernel.ops` belongs to."""
    return module.removeprefix("ejkernel.ops.").split(".")[0] if module.startswith("ejkernel.ops.") else None


def offenders(rule: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What a rule finds in each file; files in which it finds nothing are left out."""
    return {named(path) or "ops": found for path in FILES if (found := sorted(rule(path)))}


# Rooms.


def test_the_version_of_the_code_is_that_of_the_distribution():
    """It is written once, and the build reads it from there."""
    assert ejkernel.ops.__version__ == metadata.version("ejkernel-ops")


def test_every_file_is_in_a_known_room():
    """A new room has its place in the order."""
    assert {inside(f"ejkernel.ops.{named(path)}") for path in FILES if named(path)} <= {*ROOMS, *BESIDE}


@pytest.mark.one_leg
def test_a_room_imports_only_from_those_before_it():
    """Imports go one way, the lazy ones too."""

    def backwards(path):
        own = inside(f"ejkernel.ops.{named(path)}")
        leaned_on = {room for room in map(inside, imports(path)) if room in ROOMS} if own in ROOMS else set()
        return {room for room in leaned_on if ROOMS.index(room) > ROOMS.index(own)}

    assert offenders(backwards) == {}


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_beside_the_rooms_imports_only_from_core(name):
    """What every room may use itself leans on the first room alone."""
    assert {room for room in map(inside, imports(OPS / f"{name}.py")) if room in ROOMS} <= {"core"}


def test_the_test_of_rooms_sees_imports_inside_functions():
    """An import that hides in a function, relative or not, counts as well."""
    lines = ["def f():", "    from ..execution import executor", "    import ejkernel.ops.config.cache"]
    found = imported("\n".join(lines), ["ejkernel", "ops", "core"])
    assert set(map(inside, found)) == {"execution", "config"}


def test_ops_imports_nothing_else_of_the_package():
    """`ejkernel.ops` stands by itself within `ejkernel`."""

    def others(path):
        return {m for m in imports(path) if m.split(".")[0] == "ejkernel" and not f"{m}.".startswith("ejkernel.ops.")}

    assert offenders(others) == {}


def test_only_one_file_knows_private_names_of_jax():
    """`jax._src` is mentioned in `_jax.py` alone."""
    found = offenders(lambda path: re.findall(r"jax\._src[\w.]*", path.read_text(encoding="utf-8")))
    assert list(found) == ["_jax"]


def test_only_one_file_reads_the_environment():
    """The environment is read in `settings.py` alone."""
    found = offenders(lambda path: re.findall(r"\benvironb?\b|\bgetenvb?\b", path.read_text(encoding="utf-8")))
    assert list(found) == ["settings"]


# Files of the system, which no user writes; a trace in a new folder; the key file and the pipe that the user names.
_OTHER_OPENERS = {
    *("core.device", "timing.cost", "tuning.stopped", "tuning.worker.process", "tuning.worker.child_setup"),
    *("timing.profiler", "programs.result_file", "store.remote.signing"),
}


def opened(source: str) -> list[str]:
    """The places where a text opens a file by itself; a descriptor of the one opener may be wrapped."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = ast.unparse(node.args[0]) if node.args else ""
        is_open = name in ("open", "io.open", "os.fdopen") and "open_plain(" not in given
        if is_open or re.search(r"\.(read_text|read_bytes|write_text|write_bytes|from_file)$|^np\.(load|save)", name):
            found.append(f"{node.lineno}: {name}({given[:40]})")
    return found


@pytest.mark.one_leg
def test_files_are_opened_by_the_one_opener():
    """A module that opens files by itself waits for pipes, follows links and reads what has no end."""
    found = {named(path): opened(path.read_text(encoding="utf-8")) for path in FILES}
    commands = (PACKAGE / "cli").glob("*.py")
    found |= {f"cli.{path.stem}": opened(path.read_text(encoding="utf-8")) for path in commands}
    assert {name: places for name, places in found.items() if places and name not in _OTHER_OPENERS} == {}


def test_the_test_of_openers_sees_them():
    """Whatever the file is reached by."""
    lines = ["open('a')", "Path(a).read_text()", "open(plain_file.open_plain(a, b))", "np.load(a)", "self.open(a)"]
    assert [place.split(":")[0] for place in opened("\n".join(lines))] == ["1", "2", "4"]


def test_nothing_is_unpickled_but_executables_of_our_own_processes():
    """JAX's pickles of executables are read by one function, for what a worker gets through its pipe."""
    modules = re.compile(
        r"^(?:import|from) .*\b(?:pickle|cloudpickle|marshal|shelve|serialize_executable)\b", re.MULTILINE
    )
    found = offenders(lambda path: modules.findall(path.read_text(encoding="utf-8")))
    assert list(found) == ["tuning.worker.executables"]
    readers = offenders(lambda path: re.findall(r"(?<!def )\bread_back\(", path.read_text(encoding="utf-8")))
    assert list(readers) == ["tuning.worker.delivered"]


# Named tuples have their API under private names; `os._exit` and two functions of `sys` are documented.
_NOT_PRIVATE = {"_asdict", "_fields", "_make", "_replace", "_exit", "_getframe", "_current_frames"}


def reached_into(source: str) -> list[str]:
    """The private attributes of other modules' objects that a text uses: names that the text itself does not define."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = []
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
        elif node.attr.startswith("_") and not node.attr.startswith("__"):
            found.append(node)
    return [f"{node.lineno}: {ast.unparse(node)}" for node in found if node.attr not in own | _NOT_PRIVATE]


@pytest.mark.one_leg
def test_modules_hardly_reach_into_each_other():
    """Fewer than eight places use a private attribute of another module's object, private names of JAX included."""
    places = [f"{named(path)}:{place}" for path in FILES for place in reached_into(path.read_text(encoding="utf-8"))]
    assert len(places) < 8, "\n".join(places)


def test_the_test_of_private_names_sees_them():
    """What is another object's counts, whatever leads to it; what is the text's own does not."""
    lines = ["class A:", "    def __init__(self):", "        self._own = 1", "    def f(self, other):"]
    lines += ["        return other._own, self._own, self.part._theirs, other._theirs.x, other._asdict()"]
    assert reached_into("\n".join(lines)) == ["5: self.part._theirs", "5: other._theirs"]


def test_a_private_name_that_is_gone_is_a_clear_error():
    """A missing private name of JAX is an ImportError that names it, the version of JAX and what to do."""
    import jax

    from ejkernel.ops import OpsError, _jax

    for module, name in [("jax._src.core", "no_such_name"), ("jax._src.no_such_module", "name")]:
        with pytest.raises(ImportError, match=rf"{module}\.{name}") as caught:
            _jax._private(module, name)
        assert jax.__version__ in str(caught.value)
        assert "install" in str(caught.value)
        assert isinstance(caught.value, OpsError)


# Public names.


def test_the_public_names_are_these():
    """The names of `ejkernel.ops` are pinned."""
    assert sorted(ejkernel.ops.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_resolves(name):
    """Each public name is there, and `dir` shows it."""
    assert getattr(ejkernel.ops, name) is not None
    assert name in dir(ejkernel.ops)


def test_an_unknown_name_is_an_attribute_error():
    """A name that does not exist is the usual error."""
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ejkernel.ops.no_such_name
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from ejkernel.ops import no_such_name")


def declared(path: Path) -> dict[str, str]:
    """The names that a package declares for type checkers, with their modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    imported = [n for block in guarded for n in block.body if isinstance(n, ast.ImportFrom)]
    assert all(alias.asname == alias.name for n in imported for alias in n.names)
    return {alias.name: "." * n.level + (n.module or "") for n in imported for alias in n.names}


@pytest.mark.parametrize("package", ["ejkernel.ops", "ejkernel.ops.core", "ejkernel.library"])
def test_type_checkers_see_the_names_that_exist(package):
    """The imports for type checkers and the lazy table name the same things in the same places."""
    module = importlib.import_module(package)
    found = declared(Path(module.__file__))
    assert set(found) == set(module.__all__)
    for name, where in found.items():
        assert getattr(importlib.import_module(where, package), name) is getattr(module, name)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in DOCUMENTED.items() for n in names.split()])
def test_a_documented_path_works(module, name):
    """The paths of the documentation lead to the very things that `ejkernel.ops` names."""
    found = getattr(importlib.import_module(module), name)
    assert name.startswith("_") or found is getattr(ejkernel.ops, name)


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        ("from ejkernel.ops import GeneticSearch", "GuidedSearch"),
        ("import ejkernel.ops; ejkernel.ops.GeneticSearch", "GuidedSearch"),
        ("from ejkernel.ops.config.wrappers import MemoryStore", "ejkernel.ops.store.layered.MemoryStore"),
        ("from ejkernel.ops.config import maintenance; maintenance.prune", "ejkernel.ops.store.maintenance.prune"),
        ("from ejkernel.library.moe_dispatch import moe_combine", "ejkernel.library.moe_combine.moe_combine"),
    ],
)
def test_what_goes_with_the_next_release_warns_once(statement, new):
    """It works, and one warning at the line that names it says what serves instead."""
    with pytest.warns(DeprecationWarning, match="next release") as told:
        exec(compile(statement, "users.py", "exec"), {})
    (warning,) = told
    assert (warning.filename, warning.lineno) == ("users.py", 1)
    assert new in str(warning.message)


def test_a_module_that_has_moved_has_no_other_names():
    """A name that was never there is the usual error, without a warning."""
    from ejkernel.ops.config import maintenance, wrappers

    for module in (maintenance, wrappers, importlib.import_module("ejkernel.library.moe_dispatch")):
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name


def test_the_package_says_that_it_is_typed():
    """Type checkers read the package's own annotations."""
    assert (PACKAGE / "py.typed").exists()


# What an import costs.


def test_importing_the_package_imports_nothing():
    """`import ejkernel` adds itself and nothing else."""
    code = "import sys; before = set(sys.modules); import ejkernel; print(sorted(set(sys.modules) - before))"
    assert python(code).strip() == "['ejkernel']"


def test_importing_ops_does_not_import_jax():
    """A command line can start, and list the names, without JAX or numpy."""
    code = (
        "import sys, ejkernel.ops, ejkernel.ops.core\n"
        "assert 'Kernel' in dir(ejkernel.ops)\n"
        "print(sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    )
    assert python(code).strip() == "[]"


PLAIN = ["settings", "registry", "core.record", "core.key", "core.codec", "core.errors", "core.description"]


STORES = ["config.persistent", "store.folder", "config.maintenance", "config.events", "reporting.summary"]


@pytest.mark.parametrize("module", [*PLAIN, *STORES, "store.bundle", "store.lock_file", "store.remote.exchange"])
def test_a_module_of_plain_data_does_not_import_jax(module):
    """What a command line shows without a device needs no JAX."""
    code = f"import sys, ejkernel.ops.{module}; print(sorted({{'jax', 'jaxlib', 'numpy'}} & set(sys.modules)))"
    assert python(code).strip() == "[]"


def test_touching_every_name_starts_no_backend():
    """All names can be imported before `jax.distributed.initialize`, which no backend may precede."""
    code = (
        "import ejkernel.ops as ops\n"
        "for name in ops.__all__:\n"
        "    getattr(ops, name)\n"
        "import jax\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    assert python(code).strip() == "False"


# What a program that runs its own kernels imports; the rest is for tools.
EVERYDAY = [
    *("Kernel", "Invocation", "ConfigCache", "ConfigSelectorChain", "PersistentCache", "Tuner", "Executor"),
    *("AutotunePolicy", "policy_override", "overlay_cache", "default_executor", "tunable"),
]


def test_importing_costs_little_beside_jax(tmp_path):
    """The package itself takes next to nothing, and everyday names a small part of what `import jax` takes there.

    In seconds of the processor: what other processes take of it does not count.
    """
    # A copy with its bytecode ready, so that no compiling is measured, also where the sources cannot be written.
    shutil.copytree(PACKAGE, tmp_path / "ejkernel", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(tmp_path / "ejkernel", quiet=1)
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import jax\n"
        "between = time.process_time()\n"
        "import ejkernel.ops as ops\n"
        "package = time.process_time()\n"
        f"for name in {EVERYDAY}:\n"
        "    getattr(ops, name)\n"
        "end = time.process_time()\n"
        "print(between - start, package - between, end - between, ops.__file__)"
    )
    runs = [python(code, path=tmp_path, cwd=tmp_path).split(maxsplit=3) for _ in range(3)]
    assert all(str(tmp_path) in where for *_, where in runs)
    # The best of three: another process can only make a run slower.
    jax_s, package_s, names_s = min(((float(a), float(b), float(c)) for a, b, c, _ in runs), key=lambda t: t[2] / t[0])
    print(f"import jax {1e3 * jax_s:.0f} ms, package {1e3 * package_s:.1f} ms, everyday names {1e3 * names_s:.1f} ms")
    assert package_s < 0.05 * jax_s
    assert names_s < 0.25 * jax_s


# Names.


# A name in CapWords, as classes and aliases of types have; constants are written in capitals.
CAP_WORDS = re.compile(r"[A-Z]\w*[a-z]\w*")


def defined_types(source: str) -> list[str]:
    """The classes of a text's outermost level that other modules may name, and its aliases of types."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
    return [name for name in found if CAP_WORDS.fullmatch(name)]


@pytest.mark.one_leg
def test_no_two_classes_have_one_name():
    """A class or alias that other modules may name is found by its name alone; those of one module begin with `_`."""
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in defined_types(path.read_text(encoding="utf-8")):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_test_of_names_sees_aliases():
    """An alias of a type shares its name as a class does; constants and private names do not count."""
    lines = ["class Row: ...", "Rows = list[Row]", "Known: TypeAlias = 'Row'", "MOST = 3", "_Own = Row", "rows = []"]
    assert defined_types("\n".join(lines)) == ["Row", "Rows", "Known"]


def bound_names(source: str) -> list[tuple[str, str]]:
    """The names that a text gives to functions, classes, parameters, variables and attributes, each with its value."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        value = ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append((node.name, "def" if not isinstance(node, ast.ClassDef) else "class"))
        elif isinstance(node, ast.arg):
            found.append((node.arg, "parameter"))
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, ast.unparse(node.value)
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], ast.unparse(node.value) if node.value else ""
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        for target in targets:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            found += [(part.id, value) for part in parts if isinstance(part, ast.Name)]
            found += [(part.attr, value) for part in parts if isinstance(part, ast.Attribute)]
    return found


@functools.cache
def all_names() -> dict[str, list[tuple[str, str]]]:
    """The names that each file of the package binds."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): bound_names(path.read_text(encoding="utf-8")) for path in files}


def names_bound(wrong: Callable[[str, str], bool]) -> dict[str, list[str]]:
    """The names in the whole package, by file, that a rule finds wrong, given each with its value."""
    found = {path: sorted({name for name, value in names if wrong(name, value)}) for path, names in all_names().items()}
    return {path: names for path, names in found.items() if names}


def is_a_vague_lock(name: str, value: str) -> bool:
    """Does this name not say whether it is a mutex, the lock of a file or a lock file? `locked` is a public class."""
    if name == "_lock":
        return re.fullmatch(r"threading\.R?Lock\(\)", value) is None
    return name == "lock" or (name == "locked" and value == "def")


@pytest.mark.one_leg
def test_a_lock_is_a_mutex():
    """`_lock` and `mutex` are of `threading`; `file_lock` is the lock of a file, `lock_file` a file with cfgs."""
    assert names_bound(is_a_vague_lock) == {}


@pytest.mark.one_leg
def test_settled_is_the_end_of_a_record_alone():
    """The word stands in files, as `Record.stop`, and nothing has it for something else."""
    assert names_bound(lambda name, value: "settle" in name.lower()) == {}


# What has a first look in its name: the brief timing of candidates before a race.
_HAVE_LOOKS = {f"ops/tuning/{name}.py" for name in ("runner", "worker/runner", "worker/session")}


@pytest.mark.one_leg
def test_a_look_is_a_brief_timing():
    """A disk is read, and what cannot be waited for is polled."""
    word = re.compile(r"(?:^|_)look(?:s|ed)?(?:_|$)(?!up|at|through|into)", re.IGNORECASE)
    assert {*names_bound(lambda name, value: bool(word.search(name)))} == _HAVE_LOOKS


def test_the_tests_of_words_see_every_name():
    """Functions, classes, parameters, variables and attributes."""
    lines = [
        "def f(lock, *, settled: bool = True): ...",
        "class A:",
        "    lock: int",
        "self.lock = _lock = open_lock()",
    ]
    lines += ["with a as lock, b as _lock: ...", "for lock in a: ...", "lock, found = a", "def locked(): ..."]
    names = bound_names("\n".join(lines))
    assert sum(is_a_vague_lock(*each) for each in names) == 9
    assert ("settled", "parameter") in names
    assert not any(is_a_vague_lock(*each) for each in bound_names("_lock = threading.Lock()\nlock_file = a"))


# Tests.

TESTS = Path(__file__).parent
COVERED = re.compile(r"`([a-z_/]+\.py)`")


def covered() -> dict[str, set[str]]:
    """The modules that test files name after "Covers" in their docstrings, by the file."""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.relative_to(TESTS).as_posix()] = set(COVERED.findall(text.partition("Covers ")[2]))
    return found


def modules() -> set[str]:
    """Every module of the package, as test files name it: `room/module.py`, `library/...`, `cli/...`."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    return {path.relative_to(PACKAGE).as_posix().removeprefix("ops/") for path in files}


@pytest.mark.one_leg
def test_a_modules_tests_are_found_by_its_name():
    """A file is named after the module, with its folder before it where two modules share a name, or names it."""
    found = covered()
    named_in = set().union(*found.values())

    def is_found(module: str) -> bool:
        folder, _, name = module.rpartition("/")
        names = [f"test_{name}", f"test_{folder.rpartition('/')[2]}_{name}"]
        return module in named_in or any(f"{folder}/{test}".lstrip("/") in found for test in names)

    assert sorted(module for module in modules() if not is_found(module)) == []


@pytest.mark.one_leg
def test_what_test_files_say_that_they_cover_exists():
    """A module that was moved or removed is not named any more."""
    known = modules()
    found = {path: sorted(names - known) for path, names in covered().items()}
    assert {path: names for path, names in found.items() if names} == {}


# Language.

PRONOUNS = re.compile(r"\b(who|whom|whose|nobody|somebody|anybody|everybody|whoever)\b", re.IGNORECASE)
# In tests, where a kernel may be one whose times are known.
PERSONS = re.compile(PRONOUNS.pattern.replace("whose|", ""), re.IGNORECASE)
# A docstring begins with a noun or a verb, and not with a question word, a preposition, a pronoun or a denial.
RIDDLES = re.compile(
    r"(What|Which|Who|Whose|Where|When|While|How|Why|If|So|As|Like|The same|Such|Not|No|None|Nothing|Done|Told"
    r"|About|After|At|By|For|From|In|Inside|Of|On|Out|Over|To|With|Without"
    r"|It|Its|They|Their|That|This|These|Those|There)\b"
)
# Of people, not of things.
ABOUT_PEOPLE = ("users who turn it on", "a person who can write the file", "a user who has lost patience")


def sources(folder: Path) -> Iterator[tuple[Path, str]]:
    """The Python files below a folder, with their text."""
    return ((path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py")))


def riddles(source: str) -> list[str]:
    """Comments and texts that speak of a thing as of a person, and docstrings that begin with no noun and no verb."""
    return [*filter(RIDDLES.match, docstrings(source)), *personal(source)]


def docstrings(source: str) -> list[str]:
    """The docstrings of a file."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]


def comments(source: str) -> list[str]:
    """The comments of a file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def personal(source: str) -> list[str]:
    """Comments and texts of a file with the pronouns of people."""
    nodes = ast.walk(ast.parse(source))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [*filter(PRONOUNS.search, texts + comments(source))]


@pytest.mark.one_leg
def test_comments_docstrings_and_messages_name_the_thing():
    """A candidate, a process or a file is named, and a docstring begins with the thing or its act."""
    found = {path.relative_to(PACKAGE).as_posix(): riddles(text) for path, text in sources(PACKAGE)}
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_other_programs_name_the_thing(folder):
    """Comments, docstrings and messages of benchmarks and examples name it too."""
    files = [*sources(PACKAGE.parent / folder)]
    assert files
    found = {path.as_posix(): riddles(text) for path, text in files}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.one_leg
def test_tests_name_the_thing():
    """Their comments and docstrings do; texts there may be anything."""
    found = {}
    for path in TESTS.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        found[path.name] = [*filter(PERSONS.search, docstrings(source) + comments(source))]
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_pages_name_the_thing():
    """The documentation keeps the pronouns of people for people."""
    root = PACKAGE.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md")]
    found = {}
    for page in pages:
        text = " ".join(page.read_text(encoding="utf-8").split())
        for phrase in ABOUT_PEOPLE:
            text = text.replace(phrase, "")
        found[page.name] = [text[max(0, hit.start() - 40) : hit.end() + 40] for hit in PRONOUNS.finditer(text)]
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_the_test_of_language_sees_docstrings_comments_and_messages():
    """A question word at the start of a docstring is found, and a pronoun in a comment or a message."""
    source = '"""How it works."""\ndef f(name):\n    # Nobody waits.\n    return f"{name} who", "How"\n'
    assert riddles(source) == ["How it works.", " who", "# Nobody waits."]


def test_the_test_of_language_sees_how_a_docstring_begins():
    """A noun, a verb or a question is fine; a preposition, a pronoun or a denial is no beginning."""
    fine = ["The cfg.", "Gives no cfg.", "Is it stopped?", "Bytes of a row.", "`f(x)` of each row.", "Format."]
    assert [*filter(RIDDLES.match, fine)] == []
    riddled = ["As it is.", "That of one product.", "By its text.", "There are none.", "None is.", "No lock."]
    assert [*filter(RIDDLES.match, riddled)] == riddled

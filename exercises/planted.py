"""Plants a bug in a running process, and takes it back: no file is written, no module is
imported again.

    with planted(("optimizer.py", "norm + 1e-6", "norm + 1e-3")):
        ...                             every module that imported clip_coefficient sees the bug

The changed file is compiled, and each function whose text differs gets the new code object. The
function itself stays the same object, so modules that have imported it, and subclasses, run the new
code. Constants of a module or class are set. An object that was made before keeps its values.
"""

import ast
import importlib
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType

HERE = Path(__file__).resolve().parent.parent  # the repository


class CannotPlant(ValueError):
    """A change that is not there once, changes nothing, or changes more than planted() can swap."""


def changed_text(file, pairs):
    """The text of a file with each (old, new) replaced, in order; `old` must be there once."""
    text = Path(HERE, file).read_text()
    for old, new in pairs:
        if text.count(old) != 1:
            raise CannotPlant(f"{file} has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    return text


def heads(body):
    """The kinds of a module's or class's statements, and the names that they define: these must
    not change."""
    return [(type(node), getattr(node, "name", None)) for node in body]


def head_of(node):
    """The decorators, bases and defaults of a function or class: these must not change, because
    only a body can be swapped in the live object."""
    if isinstance(node, ast.ClassDef):
        parts = [*node.decorator_list, *node.bases, *node.keywords]
    else:
        parts = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    return [part and ast.dump(part) for part in parts]


def inner_code(name, code):
    """The code object of the function or class `name`, found among the constants of the code
    around it, a module's or a class's."""
    (found,) = [const for const in code.co_consts
                if isinstance(const, CodeType) and const.co_name == name]
    return found


def function_of(value):
    """The function inside of a staticmethod, a property, or a decorator that uses wraps."""
    for wrapper in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, wrapper, value)
    return value


def class_of(value, name):
    """The class of this name, which a decorator may have replaced by a subclass."""
    return next(base for base in value.__mro__ if base.__name__ == name)


class Swap:
    """Puts the changes of one file into its module."""

    def __init__(self, module, stack):
        """stack: an ExitStack, whose end undoes each change."""
        self.module = module
        self.stack = stack
        self.count = 0  # swaps so far

    def set(self, owner, name, value):
        self.stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
        self.count += 1

    def compare(self, before, after, code, owner):
        """Swap the statements that differ between two bodies of a module or class. code: the code
        object of the new body; owner: the live module or class."""
        if heads(before) != heads(after):
            raise CannotPlant(f"{owner.__name__}: a statement is added, taken away or renamed")
        for was, now in zip(before, after, strict=True):
            if ast.dump(was) != ast.dump(now):
                self.replace(was, now, code, owner)

    def replace(self, was, now, code, owner):
        """Swap one statement that differs."""
        if isinstance(now, ast.FunctionDef | ast.ClassDef) and head_of(was) == head_of(now):
            inner = inner_code(now.name, code)
            value = vars(owner)[now.name]
            if isinstance(now, ast.ClassDef):
                self.compare(was.body, now.body, inner, class_of(value, now.name))
            else:
                self.set(function_of(value), "__code__", inner)
        elif isinstance(now, ast.Assign) and ast.dump(was.targets[0]) == ast.dump(now.targets[0]):
            self.set_constant(now, owner)
        else:
            raise CannotPlant(f"{self.module.__name__}: cannot swap {ast.unparse(now)[:80]}")

    def set_constant(self, node, owner):
        """Set a constant here, and in each module of the project that has imported it."""
        name = ast.unparse(node.targets[0])
        expression = compile(ast.Expression(node.value), self.module.__name__, "eval")
        value = eval(expression, vars(self.module))
        old = getattr(owner, name)
        if owner is self.module:
            for other in list(sys.modules.values()):
                file = getattr(other, "__file__", None) or ""
                if file.startswith(str(HERE)) and vars(other).get(name) is old:
                    self.set(other, name, value)
        else:
            self.set(owner, name, value)

    def forget(self):
        """Clear the caches of the module's functions, which may hold the other code's results."""
        for value in vars(self.module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def plant(file, pairs, stack):
    """Put the changes of one file into this process."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    changed = changed_text(file, pairs)
    swap = Swap(module, stack)
    stack.callback(swap.forget)
    swap.compare(ast.parse(Path(HERE, file).read_text()).body, ast.parse(changed).body,
                 compile(changed, file, "exec"), module)
    swap.forget()
    if not swap.count:
        raise CannotPlant(f"{file}: nothing but comments changes in {pairs}")


@contextmanager
def planted(*changes):
    """While it is open, this process runs with the changes, (file, old, new) each: `old` is found
    once in the file, after the changes before it. CannotPlant if nothing changes, or if a change
    cannot be swapped: a statement added to a module or class, another decorator or default, a field
    of a dataclass."""
    files = {}
    for file, old, new in changes:
        files.setdefault(file, []).append((old, new))
    with ExitStack() as stack:
        for file, pairs in files.items():
            plant(file, pairs, stack)
        yield

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

HERE = Path(__file__).resolve().parent.parent.parent  # the repository


class CannotPlant(ValueError):
    """A change whose old text is not in the file exactly once, or that changes nothing, or more
    than planted() can swap."""


def changed_text(file, pairs):
    """The text of a file in which each (old, new) is replaced, in order. Each `old` must be in the
    text exactly once."""
    text = Path(HERE, file).read_text()
    for old, new in pairs:
        if text.count(old) != 1:
            raise CannotPlant(f"{file} contains {old!r} {text.count(old)} times, not once")
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
    # kw_defaults has None for an argument without a default
    return [ast.dump(part) if part else None for part in parts]


def inner_code(name, code):
    """The code object of the function or class `name`. code: of the module or class around it,
    whose constants hold that code object."""
    (found,) = [const for const in code.co_consts
                if isinstance(const, CodeType) and const.co_name == name]
    return found


def function_of(value):
    """The function inside of a staticmethod, a property, or a decorator that uses wraps; a plain
    function itself."""
    for wrapper in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, wrapper, value)
    return value


def class_of(value, name):
    """The class of this name. value: that class, or a subclass with which a decorator has replaced
    it."""
    return next(base for base in value.__mro__ if base.__name__ == name)


class Swap:
    """Puts the changes of one file into its module."""

    def __init__(self, module, stack):
        """stack: an ExitStack, whose end undoes each change."""
        self.module = module
        self.stack = stack
        self.count = 0  # changes so far

    def set(self, owner, name, value):
        """Set an attribute until the stack ends."""
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
        """Swap one statement, `was`, by `now`. Arguments like compare()'s."""
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
        """Set a constant in its owner; a module's, also in each module of the project that has
        imported it."""
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
    stack.callback(swap.forget)  # the stack ends in reverse order: when the old code is back
    swap.compare(ast.parse(Path(HERE, file).read_text()).body, ast.parse(changed).body,
                 compile(changed, file, "exec"), module)
    swap.forget()
    if not swap.count:
        raise CannotPlant(f"{file}: nothing but comments changes in {pairs}")


@contextmanager
def planted(*changes):
    """While the context is open, this process runs with the changes. Each is (file, old, new):
    `old` must be in the file exactly once, after the earlier changes. Raises CannotPlant if not, if
    a file's changes change nothing but comments, and for changes that cannot be swapped: a
    statement added to a module or class, another decorator or default, a field of a dataclass."""
    files = {}
    for file, old, new in changes:
        files.setdefault(file, []).append((old, new))
    with ExitStack() as stack:
        for file, pairs in files.items():
            plant(file, pairs, stack)
        yield

"""Which folder of extras/ may import which."""

from tests.test_house import IMPORTS

# What extras/planner/ may use of the engine, to measure a machine: messages
MESSAGES = {"engine.collectives", "engine.group", "engine.mesh"}


def folder(module):
    """The folder of a file of extras/, but not of its tests; "" for all other files."""
    parts = module.split(".")
    return parts[1] if parts[0] == "extras" and "tests" not in parts else ""


def test_arrows_between_folders_point_down():
    """The planner uses neither another folder nor what trains. Exercises and forks are used by no
    other folder: the forks' patches import the forks, in a copy."""
    for module, others in IMPORTS.items():
        if folder(module) == "planner":
            assert {folder(other) for other in others} <= {"planner", ""}, module
            assert {other for other in others if other.startswith("engine.")} <= MESSAGES, module
        for other in others:
            if folder(module) and folder(other) in ("exercises", "forks"):
                assert folder(module) == folder(other), (module, other)

"""Which room of extras/ may import which."""

from tests.test_house import IMPORTS

# What extras/planner/ may use of the engine, to measure a machine: messages
MESSAGES = {"engine.collectives", "engine.group", "engine.mesh"}


def room(module):
    """The room of a file of extras/, but not of its tests; "" for all other files."""
    parts = module.split(".")
    return parts[1] if parts[0] == "extras" and "tests" not in parts else ""


def test_arrows_between_rooms_point_down():
    """The planner uses neither another room nor what trains. Exercises and forks are used by no
    other room: the forks' patches import the forks, in a copy."""
    for module, others in IMPORTS.items():
        if room(module) == "planner":
            assert {room(other) for other in others} <= {"planner", ""}, module
            assert {other for other in others if other.startswith("engine.")} <= MESSAGES, module
        for other in others:
            if room(module) and room(other) in ("exercises", "forks"):
                assert room(module) == room(other), (module, other)

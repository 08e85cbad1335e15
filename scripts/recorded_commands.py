"""Commands that result files record, as they are called today: benchmarks/ was rearranged after some measurements."""

RENAMED = {
    "goldsmith bench kernelfault": "python -m benchmarks.kernelfault",
    "goldsmith bench offload": "python -m benchmarks.offload",
    "python benchmarks/assay_rates.py": "python -m benchmarks.assay.rates",
    "python benchmarks/experts_memory.py": "python -m benchmarks.experts.memory",
}


def today(command: str) -> str:
    """The recorded command with its program's present name; its options have not changed."""
    for old, new in RENAMED.items():
        if command.startswith(old):
            return new + command.removeprefix(old)
    return command

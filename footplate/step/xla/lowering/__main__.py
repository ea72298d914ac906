"""Print the table of docs/reference/xla-operations.md: `python -m footplate.step.xla.lowering`."""

from footplate.step.xla.lowering import supported_ops


def page() -> str:
    """A row for each family."""
    rows = [f"| {family} | {', '.join(f'`{name}`' for name in names)} |" for family, names in supported_ops().items()]
    return "\n".join(["| family | operations |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(page())

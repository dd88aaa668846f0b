"""Lines of several workers that share a console."""


def say(line: str) -> None:
    """Print a line in one write, so that the lines of several workers do not mix: print() writes the end of a line by itself."""
    print(f"{line}\n", end="", flush=True)

"""Tables of faults, a case a line: what is written ``::`` what is said of it, or parts of that, indented, below."""


def faults_of(table: str) -> list[tuple[str, list[str]]]:
    """(what is written, parts of what is said) of each case."""
    cases: list[tuple[str, list[str]]] = []
    for line in table.strip().splitlines():
        written, told, said = line.partition(" :: ")
        if line.startswith("  "):
            cases[-1][1].append(line.strip())
        else:
            cases.append((written, [said] if told else []))
    return cases

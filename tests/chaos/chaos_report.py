"""Text of the report on an hour of chaos. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from book import Book
from flatness import Growth

SLOWEST = 5


def report(book: Book, growths: Sequence[Growth], facts: dict[str, str]) -> str:
    """Return the report in Markdown. facts: what it ran on."""
    hits = sum(count for phases in book.hit.values() for count in phases.values())
    ended = sum(count for results in book.runs.values() for count in results.values())
    equal = sum(results["equal"] for results in book.runs.values())
    once = sum(results["settled once"] for results in book.runs.values())
    taken = [one.seconds for one in book.recoveries]
    spread = f"median {median(taken):.0f} s, at most {max(taken):.0f} s" if taken else "none"
    slowest = [(f"{one.seconds:.0f}", one.run) for one in sorted(book.recoveries, reverse=True)[:SLOWEST]]
    summary = {
        **facts,
        "minutes": f"{book.seconds() / 60:.1f}",
        "runs": f"{ended}: {equal} with the undisturbed record, {once} with each prompt settled once",
        "faults": f"{hits} of {len(book.hit)} kinds",
        "recoveries": f"{len(taken)}, {spread}",
        "left behind": str(len(book.leaks)),
        "failures": str(len(book.failures)),
    }
    parts = [
        "# Chaos\n",
        _table(("", ""), summary.items()),
        "\n## Runs\n",
        _table(("kind", "results"), ((kind, _counts(results)) for kind, results in sorted(book.runs.items()))),
        "\n## Ends of attempts\n",
        _table(("end", "attempts"), book.attempts.most_common()),
        "\n## Faults\n",
        _table(("kind", "drawn", "hit", "in phase"), (_row(book, kind) for kind in sorted(book.drawn))),
        "\n## Slowest recoveries\n",
        _table(("seconds", "run"), slowest),
        "\n## Runs that stayed away until their user resumed them\n",
        _table(("reason", "times"), book.resumed.most_common()),
        "\n## Long-lived processes\n",
        _table(("process", "minutes", "descriptors", "MiB"), map(_growth, growths)),
        *_list("Left behind", book.leaks),
        *_list("Failures", book.failures),
    ]
    return "\n".join(parts) + "\n"


def _row(book: Book, kind: str) -> tuple[str, str, str, str]:
    phases = book.hit.get(kind, Counter())
    return kind, str(book.drawn[kind]), str(phases.total()), _counts(phases)


def _growth(growth: Growth) -> tuple[str, str, str, str]:
    return (
        growth.role,
        f"{growth.minutes:.0f}",
        f"{growth.descriptors_in_the_end} ({growth.descriptors:+.0f})",
        f"{growth.mib_in_the_end:.0f} ({growth.mib_per_min:+.2f} a minute)",
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"\n## {title}\n", *(f"- {line}" for line in lines)] if lines else []

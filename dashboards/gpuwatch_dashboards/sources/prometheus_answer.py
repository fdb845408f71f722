"""What Prometheus's query API answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One series: a value of an instant query, values of a range."""

    metric: dict[str, str]
    value: tuple[float, str] | None = None
    values: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Data:
    result: list[Result]


@dataclass(frozen=True)
class Answer:
    data: Data


def value_of(result: Result) -> float:
    """Return the value of an instant query's series."""
    return float(result.value[1]) if result.value else float("nan")

"""What GPU time costs: seconds by state times the price of the GPUs that were held meanwhile. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpuwatch.errors import ConfigError

PRICE_VARIABLE = "GPUWATCH_GPU_HOUR"
"""What a GPU-hour costs, for a training process's own verdict: "4.2" or "4.2 EUR"."""

_LEAST = 0.0001


class Cost(msgspec.Struct, frozen=True):
    """What the GPUs of a run cost, by the prices of the configuration."""

    currency: str
    gpus: int
    per_hour: float
    """Of all GPUs of the run together."""
    total: float
    states: dict[str, float]

    @property
    def outside_compute(self) -> float:
        return self.total - self.states.get("compute", 0.0)


def cost_of(states_s: Mapping[str, float], hourly: Sequence[float], currency: str) -> Cost | None:
    """Return what these seconds cost with GPUs of these prices an hour; None without a GPU: a CPU's time has no price here."""
    if not hourly:
        return None
    per_hour = sum(hourly)
    states = {state: seconds / 3600 * per_hour for state, seconds in states_s.items() if seconds}
    return Cost(currency, len(hourly), per_hour, sum(states.values()), states)


def together(costs: Sequence[Cost]) -> Cost | None:
    """Return the ranks' costs as one; None where there is none."""
    if not costs:
        return None
    states: dict[str, float] = {}
    for cost in costs:
        for state, amount in cost.states.items():
            states[state] = states.get(state, 0.0) + amount
    return Cost(
        costs[0].currency,
        sum(cost.gpus for cost in costs),
        sum(cost.per_hour for cost in costs),
        sum(states.values()),
        states,
    )


def money(amount: float, currency: str) -> str:
    """Return e.g. "12.40 USD", "0.0031 USD", "< 0.0001 USD"."""
    if 0 < amount < _LEAST:
        return f"< {_LEAST} {currency}"
    return f"{amount:,.2f} {currency}" if amount >= 0.1 or amount == 0 else f"{amount:.2g} {currency}"


def price_told(environ: Mapping[str, str]) -> tuple[float, str] | None:
    """Return what a GPU-hour costs as the environment tells it; None where it does not. Raises: ConfigError."""
    text = environ.get(PRICE_VARIABLE, "").strip()
    return parse_price(text) if text else None


def parse_price(text: str) -> tuple[float, str]:
    """Return (price of a GPU-hour, currency) of e.g. "4.2 EUR"; the currency is USD unless told. Raises: ConfigError."""
    number, _, currency = text.strip().partition(" ")
    try:
        price = float(number)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise ConfigError(f"{PRICE_VARIABLE}={text!r}: give the price of a GPU-hour, e.g. {PRICE_VARIABLE}='4.2 EUR'")
    return price, currency.strip()[:8] or "USD"

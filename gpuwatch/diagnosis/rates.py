"""What training achieves a second, and what GPU time costs. Pure arithmetic."""

from collections.abc import Mapping, Sequence

import msgspec

from gpuwatch.errors import ConfigError
from gpuwatch.wire import Flops

PRICE_VARIABLE = "GPUWATCH_GPU_HOUR"  # price of a GPU-hour, for a training process's own verdict: "4.2" or "4.2 EUR"

_LEAST = 0.0001


class Cost(msgspec.Struct, frozen=True):
    """Cost of the GPUs of a run, at the configured prices."""

    currency: str
    gpus: int
    per_hour: float  # Of all GPUs of the run together, or of its share of them.
    total: float
    states: dict[str, float]
    energy: float | None = None  # Cost of their energy, not in `total`. None: not measured, or no price per kWh.

    @property
    def outside_compute(self) -> float:
        return self.total - self.states.get("compute", 0.0)


def cost_of(
    states_s: Mapping[str, float], hourly: Sequence[float], currency: str, joules: float = 0.0, kwh: float | None = None
) -> Cost | None:
    """Return the cost of these seconds on GPUs with these hourly prices, and of their energy; None without a GPU."""
    if not hourly:
        return None
    per_hour = sum(hourly)
    states = {state: seconds / 3600 * per_hour for state, seconds in states_s.items() if seconds}
    energy = joules / 3.6e6 * kwh if joules and kwh is not None else None
    return Cost(currency, len(hourly), per_hour, sum(states.values()), states, energy)


def total_cost(costs: Sequence[Cost]) -> Cost | None:
    """Return the sum of the ranks' costs; None without any."""
    if not costs:
        return None
    names = dict.fromkeys(state for cost in costs for state in cost.states)
    states = {state: sum(cost.states.get(state, 0.0) for cost in costs) for state in names}
    gpus, per_hour = sum(cost.gpus for cost in costs), sum(cost.per_hour for cost in costs)
    energy = [cost.energy for cost in costs if cost.energy is not None]
    return Cost(costs[0].currency, gpus, per_hour, sum(states.values()), states, sum(energy) if energy else None)


def money(amount: float, currency: str) -> str:
    """Return e.g. "12.40 USD", "0.0031 USD", "< 0.0001 USD"."""
    if 0 < amount < _LEAST:
        return f"< {_LEAST} {currency}"
    return f"{amount:,.2f} {currency}" if amount >= 0.095 or amount == 0 else f"{amount:.2g} {currency}"


def parse_price(text: str) -> tuple[float, str] | None:
    """Return (price of a GPU-hour, currency) of e.g. "4.2 EUR"; USD without one, None if blank. Raises: ConfigError."""
    if not text.strip():
        return None
    number, _, currency = text.strip().partition(" ")
    try:
        price = float(number)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise ConfigError(f"{PRICE_VARIABLE}={text!r}: give the price of a GPU-hour, e.g. {PRICE_VARIABLE}='4.2 EUR'")
    return price, currency.strip()[:8] or "USD"


class Done(msgspec.Struct, frozen=True):
    """What training steps achieved in a stretch of time."""

    seconds: float
    steps: int
    samples: float | None = None  # None: not counted; `tokens` likewise
    tokens: float | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Rates of one rank. None: not counted, or not declared."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None  # Achieved, by the operations declared for a step, a sample or a token.
    mfu_ratio: float | None = None  # Model FLOPs utilisation: `flops_per_s` over the declared peak.


def declared(*given: float | None) -> Flops | None:
    """Return the declared fields of `Flops`, in order; None without any. Raises: ConfigError unless numbers above 0."""
    names = ("flops_per_step", "flops_per_sample", "flops_per_token", "peak_flops")
    for name, value in zip(names, given, strict=True):
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < 1e300):
            raise ConfigError(f"{name}={value!r} is not a number above 0; leave it out where it is not known")
    return Flops(*(value and float(value) for value in given)) if any(given) else None


def throughput(done: Done, flops: Flops | None = None) -> Throughput:
    """Return the rates; all None when no time has passed."""
    if done.seconds <= 0:
        return Throughput()
    flops = flops or Flops()
    # by the finest count available
    counts = (done.tokens, flops.per_token), (done.samples, flops.per_sample), (done.steps, flops.per_step)
    per_s = next((n * each / done.seconds for n, each in counts if n is not None and each is not None), None)
    return Throughput(
        samples_per_s=None if done.samples is None else done.samples / done.seconds,
        tokens_per_s=None if done.tokens is None else done.tokens / done.seconds,
        flops_per_s=per_s,
        mfu_ratio=None if per_s is None or not flops.peak else per_s / flops.peak,
    )

"""Each GPU's energy by its ledger's states: the driver's counter joined with it. No I/O and no clock; times in ns."""

import msgspec

from gpuwatch.ledger.states import GPU_STATES, UNKNOWN, Ledger

MOST_WATTS = 3000.0  # no GPU uses more. A counter that grows faster has jumped, and what it grew by is left out.
_COUNTER_LAG_S = 1.0  # of the driver's own updates of its counter
_KEPT = 600


class EnergyAccount(msgspec.Struct):
    """A GPU's energy by state since the first reading of its counter. It is its own record over a restart of the agent.

    Between readings, a second apart, power counts as constant: the states of a second share its energy by their time.
    """

    joules: dict[str, float] = {}  # by state. Their sum is what the counter grew by, up to the ledger's watermark.
    counter: float | None = None  # the last reading, in joules; None: there is no counter
    readings: list[tuple[int, float]] = []
    """(when, growth since the first one), oldest first, from the last one before the ledger's watermark on."""
    since_ns: dict[str, int] = {}  # time in the ledger after the last reading, by state

    def book(self, state: str, begin_ns: int, until_ns: int) -> None:
        """Account for time that was booked in the ledger."""
        if not self.readings:
            return
        last_ns = self.readings[-1][0]
        known = self._grown(min(until_ns, last_ns)) - self._grown(min(begin_ns, last_ns))
        self.joules[state] = self.joules.get(state, 0.0) + known
        if until_ns > last_ns:
            self.since_ns[state] = self.since_ns.get(state, 0) + until_ns - max(begin_ns, last_ns)
        while len(self.readings) > 1 and self.readings[1][0] <= until_ns:
            del self.readings[0]

    def read(self, counter: float | None, now_ns: int) -> None:
        """Take a reading, None for none. A counter that fell began at 0 again.

        One that did not change was not read again (a dcgm-exporter's, every 30 s): no GPU uses no power.
        """
        if counter is None or counter == self.counter:
            return
        last_ns, total = self.readings[-1] if self.readings else (now_ns, 0.0)
        grown = counter - self.counter if self.counter is not None and counter > self.counter else counter
        if self.counter is None or grown > MOST_WATTS * ((now_ns - last_ns) / 1e9 + _COUNTER_LAG_S):
            grown = 0.0
        for state, ns in self.since_ns.items():
            self.joules[state] = self.joules.get(state, 0.0) + grown * ns / max(1, now_ns - last_ns)
        self.counter, self.since_ns = counter, {}
        self.readings.append((now_ns, total + grown))
        if len(self.readings) > _KEPT:  # the ledger is far behind
            del self.readings[1:-1:2]

    def _grown(self, at_ns: int) -> float:
        """Return the growth from the first reading to a moment that is not after the last one."""
        end_ns, end = self.readings[-1]
        for begin_ns, begin in reversed(self.readings):  # the moment is nearly always after the last but one
            if begin_ns <= at_ns < end_ns:
                return begin + (end - begin) * (at_ns - begin_ns) / (end_ns - begin_ns)
            end_ns, end = begin_ns, begin
        return self.readings[-1][1] if at_ns >= self.readings[-1][0] else end


class MeteredLedger(Ledger):
    """A GPU's ledger, and its energy by state: all `unknown` if split, as which instance used it is not measured."""

    __slots__ = ("energy", "is_split")

    def __init__(self, start_ns: int, is_split: bool = False) -> None:
        super().__init__(start_ns, GPU_STATES)
        self.energy = EnergyAccount()
        self.is_split = is_split

    def book(self, state: str, until_ns: int) -> int:
        begin_ns = self.watermark_ns
        if booked := super().book(state, until_ns):
            self.energy.book(UNKNOWN if self.is_split else state, begin_ns, until_ns)
        return booked

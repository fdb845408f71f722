"""Was the cause named? One `Evaluated` for each program that has run."""

from __future__ import annotations

from dataclasses import dataclass

from .stage import ALARMS, Outcome


@dataclass(frozen=True)
class Evaluated:
    """The outcome of a program, compared with the truth."""

    outcome: Outcome

    @property
    def is_mixture(self) -> bool:
        """Whether two things are wrong that do not follow from each other."""
        return self.outcome.program.mixed

    @property
    def listed(self) -> list[str]:
        """Causes in the agent's last look, the first one first. Information counts only where it is the truth."""
        reported = self.outcome.program.causes
        return [f["cause"] for f in self.outcome.agent if f["severity"] in ALARMS or f["cause"] in reported]

    @property
    def first(self) -> str | None:
        return next(iter(self.listed), None)

    @property
    def true_cause(self) -> str:
        return next(iter(self.outcome.program.causes), "nothing")

    @property
    def faults(self) -> list[str]:
        """What is wrong with the outcome; empty if nothing is."""
        program, outcome = self.outcome.program, self.outcome
        if outcome.failed is not None:
            return [outcome.failed]
        allowed = {*program.causes, *program.also}
        if not (program.gpu or program.cuda):
            allowed.add("step_waits")  # their steps sleep in place of a device's work, which the hook names
        faults = [f"{cause} was not named" for cause in program.causes if cause not in self.listed]
        if not faults and program.causes and self.first != program.causes[0]:
            faults.append(f"{self.first} was named first")
        under = {f["cause"] for f in outcome.agent if f["root"] in program.causes}  # a consequence of what is wrong
        faults += [f"{cause} was named" for cause in self.listed if cause not in allowed | under]
        if not program.causes:
            faults += [f"{cause} alarmed" for cause in outcome.ever if cause not in (*self.listed, *allowed)]
        hooks = {finding["cause"] for finding in outcome.hook}
        if program.hook_sees:
            faults += [f"the hook alone did not name {cause}" for cause in program.causes if cause not in hooks]
        if not program.causes:
            # To the hook alone a step on the fake device, which no driver lists, sleeps on the CPU.
            alarms = {f["cause"] for f in outcome.hook if f["severity"] in ALARMS} - allowed - {"step_waits"}
            faults += [f"the hook alone named {cause}" for cause in sorted(alarms)]
        return faults

    @property
    def ok(self) -> bool:
        return self.outcome.skipped is None and not self.faults

    def row(self) -> str:
        """Return the row of the table."""
        program, outcome = self.outcome.program, self.outcome
        causes = ", ".join(f"`{cause}`" for cause in program.causes) or "nothing"
        node = (
            ", ".join(
                filter(
                    None,
                    (
                        "alone" if program.node == "alone" else "",
                        "fake GPU" if program.gpu else "",
                        "GPU" if program.cuda else "",
                    ),
                )
            )
            or "real"
        )
        if outcome.skipped is not None:
            return f"| {program.name} | {causes} | {node} | | | | | not run: {outcome.skipped} |"
        first = f"`{self.first}`" if self.first else "nothing"
        others = ", ".join(f"`{cause}`" for cause in self.listed[1:])
        after = max((outcome.ever.get(cause, 0.0) for cause in program.causes), default=0.0)
        hook = list(
            dict.fromkeys(f["cause"] for f in outcome.hook if f["severity"] in ALARMS or f["cause"] in program.causes)
        )
        alone = ", ".join(f"`{cause}`" for cause in hook) or "nothing"
        if program.causes and not program.hook_sees:
            alone += " (takes an agent)"
        mark = "ok" if self.ok else "**" + "; ".join(self.faults) + "**"
        return f"| {program.name} | {causes} | {node} | {first} | {others} | {f'{after:.0f}' if after else ''} | {alone} | {mark} |"

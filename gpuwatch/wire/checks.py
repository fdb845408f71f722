"""What a message must be before anybody believes it: every bound of the contract. Nothing that a sender says is trusted."""

from __future__ import annotations

from math import isfinite

from gpuwatch.errors import ProtocolError
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.wire.columns import STEP_COLUMNS
from gpuwatch.wire.messages import STEP_BUCKETS_S, Hello, Message, Phase, Steps, Totals, WorkerDeath

MAX_TEXT = 256
MAX_TAGS = 32
MAX_STEPS_A_MESSAGE = 8192
MAX_DEATHS = 256
_LARGEST = 1 << 62
_COLUMNS = frozenset(STEP_COLUMNS)
_STATES = frozenset(RUN_STATES)


def check(message: Message) -> None:
    """Raise ProtocolError, whose `reason` is a short word fit for a label, if a message breaks a bound."""
    _check_texts(message)
    _check_numbers(message)
    if isinstance(message, Steps):
        _check_columns(message)
    if not isinstance(message, Hello):
        _check_totals(message.totals)


def _check_texts(message: Message) -> None:
    texts = [message.run, message.origin.sender, message.origin.boot_id]
    if isinstance(message, Hello):
        if len(message.tags) > MAX_TAGS or len(message.versions) > MAX_TAGS:
            raise ProtocolError(f"more than {MAX_TAGS} tags", "too_many_tags")
        texts += [message.name, message.job, message.host, message.device, message.timeline]
        texts += [text for pair in (*message.tags.items(), *message.versions.items()) for text in pair]
    elif isinstance(message, Phase):
        texts.append(message.name)
    elif isinstance(message, Steps):
        texts.append(message.activity)
    if max(map(len, texts)) > MAX_TEXT:
        raise ProtocolError(f"a text of more than {MAX_TEXT} characters", "text_too_long")
    if not message.run:
        raise ProtocolError("an empty run id", "malformed")


def _check_numbers(message: Message) -> None:
    """Refuse what no process can have: numbers that a database's 64 bits cannot hold, shares that are no numbers."""
    origin = message.origin
    numbers = [origin.seq, origin.monotonic_ns, origin.time_ns, message.rank]
    ratios: list[float | None] = []
    if isinstance(message, Hello):
        numbers += [
            message.local_rank,
            message.world_size,
            message.pid,
            message.process_start_ticks,
            message.pid_namespace,
        ]
        if len(message.worker_deaths) > MAX_DEATHS:
            raise ProtocolError(f"more than {MAX_DEATHS} dead workers", "too_large")
        numbers += [number for death in message.worker_deaths for number in _of(death)]
        if message.flops is not None:
            ratios += [getattr(message.flops, name) for name in message.flops.__struct_fields__]
    else:
        totals = message.totals
        numbers += [totals.start_ns, totals.watermark_ns, totals.steps, totals.records_dropped, totals.overhead_ns]
        numbers += [totals.hidden_ns, totals.device_steps, totals.tokens + 1, totals.comm_steps]
        numbers += [totals.drained_steps, totals.kept_up_steps, totals.read_back_steps]
        numbers += [totals.unverified_steps, totals.fetches_sampled]
        numbers += [totals.worker_fetches, totals.ready_batches, totals.empty_fetches]
        numbers += [totals.samples + 1, *totals.states_ns.values(), *totals.phases_ns.values(), *totals.step_histogram]
    if isinstance(message, Steps):
        numbers.append(message.first_step)
        ratios.append(message.fetch_cpu_ratio)
    elif isinstance(message, Phase):
        numbers.append(message.start_ns)
        ratios += [message.seconds, message.time_to_live_s]
    if min(numbers) < 0 or max(numbers) > _LARGEST:
        raise ProtocolError("a number that is negative, or larger than anything that can be counted", "malformed")
    if any(ratio is not None and not isfinite(ratio) for ratio in ratios):
        raise ProtocolError("a number that is none", "malformed")


def _of(death: WorkerDeath) -> tuple[int, ...]:
    sizes = (death.oom_kills, death.memory_limit_bytes, death.shm_size_bytes, death.shm_free_bytes)
    return death.pid, death.signal, *(size or 0 for size in sizes)


def _check_columns(message: Steps) -> None:
    lengths = set(map(len, message.columns.values()))
    if not message.columns.keys() <= _COLUMNS:
        raise ProtocolError(f"unknown columns {sorted(message.columns.keys() - _COLUMNS)}", "malformed")
    if len(lengths) > 1 or any(length % 8 for length in lengths):
        raise ProtocolError(f"step columns of unequal or odd lengths {sorted(lengths)}", "malformed")
    if any(length > 8 * MAX_STEPS_A_MESSAGE for length in lengths):
        raise ProtocolError(f"more than {MAX_STEPS_A_MESSAGE} steps in a message", "too_large")


def _check_totals(totals: Totals) -> None:
    states = totals.states_ns
    if not states.keys() <= _STATES or min(states.values(), default=0) < 0:
        raise ProtocolError("totals with an unknown state or negative time", "malformed")
    if sum(states.values()) != totals.watermark_ns - totals.start_ns:
        raise ProtocolError("totals whose sum is not the time they cover", "unbalanced")
    if len(totals.step_histogram) != len(STEP_BUCKETS_S) + 1:
        raise ProtocolError("a step histogram of another shape", "malformed")

"""Kinds of entries in the training thread's log, and its activities. The recorder writes, the timeline reads them."""

from numbers import Integral

STEP, PART, SPAN, ENTER, EXIT, TOKENS, COMM, REST, UNVERIFIED, FAST_STEP, SECTION = range(11)
"""Kinds of log entries; the first field of each tuple. Times in ns.

(STEP, begin, end, data_wait, transfer, samples, epoch_start, piece)   a step, or its last part
(FAST_STEP, begin, end, batch_ready, transfer, samples)    a step too; its batch was ready at `batch_ready`
(PART, begin, end, data_wait, transfer, samples, epoch_start, piece)   a part of a step that goes on after other work
(SPAN, begin, end, state, data_wait, at_end)               time of one state outside steps; `other`: the loop was left
(ENTER, at, name)                                          a phase begins; name None: a nested training loop
(EXIT, at)                                                 the innermost one ends
(TOKENS, count)                                            tokens of the open step, in addition to those it has already
(COMM, begin, end)                                         the open step waited for other ranks' gradients
(REST, resting)                                            the device's timeline rests, or measures again
(UNVERIFIED,)                                              work on another stream or device was seen in the open step
(SECTION, name, at)                                        the open step's forward, backward or optimizer section begins

`piece` is the `gpuwatch.ledger.device_pieces.Piece` whose times the device's timeline will set; None, or left out,
where only the host's clock measures.
"""

STARTUP, DATA_WAIT, IN_STEP, BETWEEN, IDLE, PHASE = "startup", "data_wait", "step", "between_steps", "idle", "phase "
"""Activities of the training thread. IDLE: its loop has ended or was left. PHASE precedes a declared phase's name."""

TRANSFERRING = "transfer"  # in a step, copying a batch to the device. Published as IN_STEP.

UNKNOWN_SAMPLES = -1  # or tokens
_MOST_SAMPLES = 1 << 32  # of one step: sums of more would not fit into a message


def known_count(count: object) -> int:
    """Return a step's number of samples or tokens, numpy's too; UNKNOWN_SAMPLES of what cannot be one."""
    if not isinstance(count, int):  # of a tensor, the device would be waited for
        count = int(count) if count is not None and isinstance(count, Integral) else UNKNOWN_SAMPLES
    return count if 0 <= count < _MOST_SAMPLES else UNKNOWN_SAMPLES


CLOSED = -1  # the training thread of a recorder that is closed, or that a fork copied: nothing is recorded any more

COPY_FOLLOWS_NS = 100_000  # a copy so soon after the batch, or after the copy before, continues it

MARKED = object()  # owner of the step between two plain calls of `w.step()`

TAKEN = object()  # owner of a step whose loop was dropped with its first batch: `next(iter(loader))`

LOOSE = object()  # owner of a wait or a copy outside of any step: it becomes a part of the next one

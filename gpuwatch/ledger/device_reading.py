"""Times of pieces that the device has finished, from differences between their events.

An event on an empty stream is reached when it is recorded: there the device's clock meets the host's. From there on one
`elapsed` a piece is enough. Not every quick piece on a starved device needs one: its lag behind the host is sampled.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from gpuwatch.ledger.device_pieces import DETAILED_NS, MOST_COPIES, DeviceTimes, Events, Piece
from gpuwatch.ledger.states import sections_ns

SHORT_PAUSE_NS = 50_000  # a shorter pause of the host is ignored
# A shorter pause with more work launched after it is a gap between launches: compute, as between any two kernels.
LAUNCH_GAP_NS = 1_000_000
LAG_SAMPLED = 1 / 8  # share of the quick pieces on a starved device that are measured at least
LAG_PIECES = 1000
LAG_ERROR = 0.005  # where the lag varies more are measured: to this standard error over so many, by their time
_LAGS_FIRST = 32  # so many are measured before others are estimated by them
_CLOCKS_AGREE_NS = 100_000
RELIED_ON_NS = 2_000_000_000  # so long after the two clocks met the host's serves
_DRIFT = 20_000  # two clocks may drift apart by one part in so many


class PieceReader:
    """Reads pieces in their order. Raises what an event call raises."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.piece_ns = self.host_ns = 0.0  # of a piece, lately; the second: from the batch to the end on the host
        self._unfinished_asides: list[tuple[Any, Any]] = []  # for a later batch
        self._asides_read = 0
        # means of the gaps after such copies, and of the part that waited for them alone
        self._aside_gap_ns = self._felt_ns = 0.0
        self.reached_ns: int | None = None  # when the device reached the end of the piece that was read last
        self._end: Any | None = None  # that end, while a later piece may hold it
        self._met_ns = 0  # when the two clocks met last
        self._is_anchored = True  # whether the clocks have met since measuring began
        self._works_in_fetch = False  # something on the home stream is launched while a batch is fetched
        self._copied = 0
        # Means: copies of pieces in detail, and the device's time from the batch to the optimizer's last launch.
        self._transfer_ns = self._late_ns = 0.0
        self._to_launch_ns = 0.0
        # A quick piece's lag behind the host, between two waits: times measured, estimated since, mean and variance.
        self._lags = self._lags_estimated = 0
        self._lag_ns = self._lag_variance = 0.0
        self._lag_carried_ns = 0.0  # by how much the estimates so far were too low in all
        self._launches_timed = 0  # pieces that `_to_launch_ns` is the mean of
        self._run_ns = 0  # when the device reached the first batch of the run that is read
        self._waits_timed = 0
        self._wait_ns = 0.0  # the mean of a wait for other ranks, and of how many pieces

    def measure_runs(self, pieces: Sequence[Piece]) -> None:
        """Measure pieces without idle time of the device between them as one, by one call; share their time evenly."""
        run: list[Piece] = []
        for piece, following in zip_longest(pieces, pieces[1:]):
            run.append(piece)
            follows = following is not None and following.batch is piece.end
            if follows and not (piece.detailed or following.detailed or piece.waits or following.waits):
                continue
            if len(run) > 1:
                run_ns = max(0, self._events.elapsed_ns(run[0].batch, run[-1].end))
                for number, each in enumerate(run):
                    each.in_run_ns = run_ns * number // len(run), run_ns * (number + 1) // len(run)
            run = []

    def read(self, piece: Piece, following: Piece | None, observed_ns: int) -> None:
        """Set the piece's times, and give its events back. `following`: the piece after it, if that has ended too."""
        elapsed = self._events.elapsed_ns
        before_ns, reached_ns, gap_ns = self._batch(piece)
        reached_ns = min(reached_ns, max(observed_ns, piece.end_ns))  # whatever the device's clock says
        with_asides = bool(piece.asides)
        felt_ns = self._aside(piece, before_ns, reached_ns) if with_asides or self._unfinished_asides else 0
        if gap_ns:
            empty_ns = piece.begin_ns - gap_ns
            gap_ns -= sum(max(0, min(end, piece.begin_ns) - max(begin, empty_ns)) for begin, end in piece.reads)
            if piece.asides_missed and self._felt_ns:
                felt_ns = max(felt_ns, int(gap_ns * self._felt_ns / self._aside_gap_ns))
            elif with_asides:
                self._asides_read += 1
                weight = max(0.125, 1 / self._asides_read)
                self._aside_gap_ns += weight * (gap_ns - self._aside_gap_ns)
                self._felt_ns += weight * (min(felt_ns, gap_ns) - self._felt_ns)
            gap_ns = max(0, gap_ns - felt_ns)
        most_lag_ns = self._most_lag_ns(piece, following)
        is_estimated = most_lag_ns is not None and not self._is_sampled(piece, following)
        if most_lag_ns is not None and is_estimated:
            total_ns = piece.end_ns + self._estimated_lag_ns(most_lag_ns) - reached_ns
        elif piece.in_run_ns is None:
            total_ns = max(0, elapsed(piece.batch, piece.end))
        else:  # where the run's time is not shared as evenly, the last one makes up for it
            if piece.in_run_ns[0] == 0:
                self._run_ns = reached_ns
            total_ns = max(0, self._run_ns + piece.in_run_ns[1] - reached_ns)
        end_ns = max(min(reached_ns + total_ns, observed_ns), piece.end_ns)
        total_ns = min(total_ns, end_ns - reached_ns)
        if most_lag_ns is not None and not is_estimated:
            self._sample_lag(end_ns - piece.end_ns)
        transfer_ns = late_ns = 0
        if piece.copies:
            copies = [max(0, elapsed(begin, end)) for begin, end in piece.copies]
            if not piece.follows and piece.launching_ns:  # an idle device waited for the host to launch them
                copies[0] = max(0, copies[0] - piece.launching_ns)
            transfer_ns = sum(copies)
            if piece.launch_ns:
                late = zip(piece.copies[piece.late_copies :], copies[piece.late_copies :], strict=True)
                for (_, end), took_ns in late:  # as far as they ran before the host's end
                    after_ns = end_ns - max(0, elapsed(end, piece.end)) - piece.end_ns
                    late_ns += max(0, took_ns - max(0, after_ns))
        if piece.detailed and piece.copied:
            self._copied += 1
            self._transfer_ns += max(0.125, 1 / self._copied) * (transfer_ns - self._transfer_ns)
            self._late_ns += max(0.125, 1 / self._copied) * (late_ns - self._late_ns)
        elif piece.copied:
            transfer_ns, late_ns = int(self._transfer_ns), int(self._late_ns) if piece.launch_ns else 0
        transfer_ns = min(transfer_ns, total_ns)
        idle_ns, lag_ns = self._after_launch(piece, reached_ns, end_ns, late_ns)
        if idle_ns is not None:
            idle_ns = min(idle_ns, total_ns - transfer_ns) if self._is_anchored else 0
        compute_ns = total_ns - transfer_ns - (idle_ns or 0)
        comm_ns = self._waited(piece)
        piece.times = DeviceTimes(
            reached_ns,
            end_ns,
            gap_ns,
            compute_ns,
            transfer_ns=transfer_ns + felt_ns,
            host_wait_ns=idle_ns,
            lag_ns=lag_ns if self._is_anchored and not is_estimated else None,
            is_anchored=self._is_anchored,
            read_back=piece.read_back,
            aside_ns=felt_ns,
            observed_ns=observed_ns,
            comm_ns=None if comm_ns is None else min(comm_ns, compute_ns),
            sections_ns=None if piece.marks is None else sections_ns(piece.marks, elapsed, compute_ns),
        )
        self.reached_ns = end_ns
        self.release(piece)

    def _batch(self, piece: Piece) -> tuple[int | None, int, int | None]:
        """Return when earlier work ended, when the device reached the batch, its idle time between; None: not known."""
        at_ns, before_ns = piece.begin_ns, self.reached_ns if piece.chained else None
        if piece.previous is None:
            if piece.follows and before_ns is not None:
                return before_ns, before_ns, 0
            self._met_ns, self._is_anchored = at_ns, not piece.follows
            return None, at_ns, 0 if piece.follows else None
        age_ns = at_ns - self._met_ns
        is_plain = not (piece.detailed or piece.follows or self._works_in_fetch)
        if before_ns is not None and age_ns < RELIED_ON_NS and is_plain:
            self._met_ns, self._is_anchored = at_ns, True
            return before_ns, at_ns, max(0, at_ns - before_ns)
        passed_ns = max(0, self._events.elapsed_ns(piece.previous, piece.batch))
        self._is_anchored = self._is_anchored or not piece.follows
        if before_ns is None:  # measuring began there: the device was done with what came before then or later
            before_ns, age_ns = max(piece.started_ns, at_ns - passed_ns), 0
        if piece.follows:
            return before_ns, before_ns + passed_ns, 0
        late_ns = before_ns + passed_ns - at_ns
        self._works_in_fetch = late_ns > _CLOCKS_AGREE_NS + age_ns // _DRIFT
        if self._works_in_fetch:  # work was launched during the fetch, and was not done when the batch was in hand
            return before_ns, at_ns + late_ns, max(0, at_ns - before_ns)
        self._met_ns = at_ns
        return at_ns - passed_ns, at_ns, passed_ns

    def _most_lag_ns(self, piece: Piece, following: Piece | None) -> int | None:
        """Return the largest possible lag behind the host at the end of a piece between two waits; None: measure it."""
        if following is None or following.previous is not piece.end or following.follows:
            return None
        if piece.follows or piece.in_run_ns is not None or self._works_in_fetch:
            return None
        if piece.end_ns - piece.begin_ns > self.host_ns + self.piece_ns / 16:
            return None
        most_ns = following.begin_ns - piece.end_ns
        return most_ns if most_ns < DETAILED_NS else None

    def _is_sampled(self, piece: Piece, following: Piece | None) -> bool:
        """Return whether such a piece's lag is measured: always before a detailed one, as clocks are compared there."""
        if piece.detailed or self._lags < _LAGS_FIRST or (following is not None and following.detailed):
            return True
        varies = self._lag_variance / (LAG_PIECES * (LAG_ERROR * max(1.0, self.piece_ns)) ** 2)
        return piece.draw < max(LAG_SAMPLED, varies)

    def _sample_lag(self, lag_ns: int) -> None:
        """Add a measured lag to the mean. Estimates since the last one were off by as much: the next compensate."""
        off_ns = lag_ns - self._lag_ns
        self._lag_carried_ns += self._lags_estimated * off_ns
        self._lags_estimated = 0
        self._lags += 1
        self._lag_variance += max(1 / 32, 1 / self._lags) * (off_ns**2 - self._lag_variance)
        self._lag_ns += max(1 / 8, 1 / self._lags) * off_ns

    def _estimated_lag_ns(self, most_ns: int) -> int:
        """Return a piece's estimated lag, within what is possible; the next estimates make up for what is cut off."""
        self._lags_estimated += 1
        lag_ns = min(max(0, round(self._lag_ns + self._lag_carried_ns / 8)), most_ns)
        self._lag_carried_ns += self._lag_ns - lag_ns
        return lag_ns

    def drop(self, copies: Sequence[tuple[Any, Any]]) -> None:
        """Give back the events of copies on other streams that no batch is measured by."""
        for pair in copies:
            for event in pair:
                self._events.release(event)

    def _aside(self, piece: Piece, before_ns: int | None, reached_ns: int) -> int:
        """Return for how long the stream, before it reached the batch, only waited for copies on other streams."""
        events = self._events
        if not piece.chained:  # those of before measuring began again
            dropped, self._unfinished_asides = self._unfinished_asides, []
            self.drop(dropped)
        copies, self._unfinished_asides = [*self._unfinished_asides, *piece.asides], []
        piece.asides = ()
        felt_ns = 0
        for begin, end in copies:
            until_ns = reached_ns - events.elapsed_ns(end, piece.batch) if events.ready(end) else reached_ns + 1
            is_done = until_ns <= reached_ns  # else only what the stream is made to wait for later was felt
            if before_ns is not None and (is_done or (piece.awaits_asides and events.ready(begin))):
                from_ns = reached_ns - events.elapsed_ns(begin, piece.batch)
                felt_ns += max(0, min(until_ns, reached_ns) - max(from_ns, before_ns + felt_ns))
            if is_done:
                self.drop([(begin, end)])
            else:
                self._unfinished_asides = [*self._unfinished_asides, (begin, end)][-MOST_COPIES:]
        return felt_ns

    def _waited(self, piece: Piece) -> int | None:
        """Return how long the stream waited for other ranks; where that was not timed, by the mean of timed waits."""
        if not piece.waits_seen:
            return piece.waits_seen
        if len(piece.waits) == piece.waits_seen:
            waited_ns = sum(max(0, self._events.elapsed_ns(begin, end)) for begin, end in piece.waits)
            self._waits_timed += 1
            self._wait_ns += max(0.125, 1 / self._waits_timed) * (waited_ns / piece.waits_seen - self._wait_ns)
            return waited_ns
        return int(self._wait_ns * piece.waits_seen) if self._waits_timed else None

    def _after_launch(self, piece: Piece, reached_ns: int, end_ns: int, late_ns: int) -> tuple[int | None, int | None]:
        """Return how long the device idled after the optimizer's last launch, and its lag behind the host then."""
        lag_ns = max(end_ns - piece.end_ns, piece.blocked_ns)
        if not piece.launch_ns:
            return None, lag_ns or None
        pause_ns = piece.end_ns - piece.launch_ns - piece.paused_ns
        if piece.launch is not None and (pause_ns > SHORT_PAUSE_NS or lag_ns == 0):
            launch_ns = max(piece.launch_ns, end_ns - max(0, self._events.elapsed_ns(piece.launch, piece.end)))
            self._launches_timed += 1
            self._to_launch_ns += max(0.25, 1 / self._launches_timed) * (launch_ns - reached_ns - self._to_launch_ns)
            lag_ns, known = max(lag_ns, launch_ns - piece.launch_ns), True
        else:
            launch_ns, known = max(piece.launch_ns, reached_ns + int(self._to_launch_ns)), lag_ns > 0
        if pause_ns <= SHORT_PAUSE_NS:
            return 0, lag_ns if known else None
        # While a result is waited for, the device catches up.
        busy_ns = max(launch_ns - piece.launch_ns + late_ns, piece.paused_ns)
        idle_ns = piece.end_ns - piece.launch_ns - busy_ns
        if idle_ns < LAUNCH_GAP_NS and end_ns - piece.end_ns > SHORT_PAUSE_NS:
            idle_ns = 0
        return max(0, idle_ns), lag_ns if known else None

    def release(self, piece: Piece, kept: Any | None = None) -> None:
        """Give back all events but `kept` and the end: that is the next piece's `previous`, `batch` or neither."""
        end, self._end = (None, self._end) if piece.end is None else (self._end, piece.end)
        events = [end, piece.previous, piece.batch, piece.launch]
        events += [event for pair in (*piece.copies, *piece.waits, *piece.asides) for event in pair]
        events += [event for _, event in piece.marks or ()]
        for event in {id(event): event for event in events if event is not None and event is not kept}.values():
            self._events.release(event)

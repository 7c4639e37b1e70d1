"""How a buffer's calls get to its servers: attempts on the engine, and recovery after a failed attempt.

paths.py finds and keeps paths, recovery.py decides what follows a failure, unfinished_calls.py does the rest of a call
in parts, and accounts.py records the outcome of a call that an error ended. None of these modules knows the dispatcher.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from smb import engine
from smb.buffer_info import BufferInfo
from smb.call import accounts
from smb.call.accounts import here, outcome_of_change
from smb.call.arguments import Arguments
from smb.call.operands import check_warden
from smb.call.outcomes import Failed, error_of, ranges_of
from smb.call.paths import Paths, handles_of
from smb.call.reaching import pauses
from smb.call.recovery import UNREACHED, WITHOUT_IT, Action, Facts, Heard, decide, needs_paths
from smb.call.session import Fence, Session
from smb.call.sync_requests import LOST_WAIT_MS
from smb.call.unfinished_calls import bring, do_rest
from smb.config import tracing
from smb.config.backoff import Backoff
from smb.engine import (
    NOWHERE,
    Attempt,
    BufferHandle,
    DirectTarget,
    EngineError,
    Opcode,
    Outcome,
    PartOutcome,
    Request,
    Status,
    Window,
    take_interrupt,
)
from smb.errors import APPLIED, NOT_APPLIED, UNKNOWN, CallOutcome, Error, InvalidArgumentError
from smb.transport.base import Deadline

_REFUSED_WAIT_MS = 1000  # wait for the answers to the other parts of a call after one part was refused
_AGAIN_WAIT_MS = 100  # the same wait, after a part was refused with a newer token, too
_NOBODY: Sequence[BufferHandle] = ()
_REWRITES = (Opcode.WRITE, Opcode.FILL)  # changes that may be repeated: doing a part of one twice does no harm


class _Call:
    __slots__ = (
        "attempt", "backoff", "ended", "fence", "handle", "made", "others", "reopened", "request", "touched", "until",
        "warden",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        fence: Fence | None,
        others: tuple[Dispatcher, ...],
        until: float,
        ended: Outcome | None,
        handle: BufferHandle | None,
    ) -> None:
        self.made = self.request = request  # `made` is what the caller asked for, `request` is what servers get
        self.fence = fence
        self.others = others
        self.warden: Dispatcher | None = None  # of the buffer whose lock `fence` is, if that is another one
        self.until = until
        self.ended = ended  # how the last attempt failed; None: an attempt has to be made
        self.handle = handle  # used by the last attempt
        self.attempt: Attempt | None = None  # the last one
        self.touched = False  # an attempt before the last one may have changed something
        self.reopened = False  # newer tokens were requested
        self.backoff: Backoff | None = None  # created at the first pause: most calls need none

    @property
    def deadline(self) -> Deadline:
        """The time up to which the call may block, in all its attempts."""
        return Deadline(0.0, self.until)

    @property
    def beside(self) -> tuple[Dispatcher, ...]:
        """All buffers that servers need for the call, besides the one that it is made on."""
        return self.others if self.warden is None else (*self.others, self.warden)

    def done(self) -> Outcome | int | None:
        """Return how the engine's part of the call ended; None if that part did not begin."""
        if here.finished is self.made or here.finished is self.request:
            return 0
        return self.ended if self.attempt is None else self.attempt.ended

    def pause(self) -> None:
        """Sleep before the next attempt, at most up to the deadline."""
        self.backoff = self.backoff or pauses(self.deadline)
        time.sleep(self.backoff.next_s())


class Dispatcher:
    """Makes one buffer's calls on the engine, by the best path to each segment. A failed attempt is repeated, by other
    paths if necessary, where no part of a call can be done twice.
    """

    def __init__(self, session: Session, info: BufferInfo) -> None:
        self.session = session
        self.arguments = Arguments(info)
        # A weak reference: a cycle would keep a dropped buffer's mappings and links until a garbage collection.
        self.target = DirectTarget(functools.partial(_go_on, weakref.ref(self)))
        self.turns = session.turns_of(info.id, self.arguments.itemsize)
        self.paths = Paths(session, self.arguments, self.target, self.turns)
        self.unversioned = info.versions == 1

    @property
    def info(self) -> BufferInfo:
        """The coordinator's last description of the buffer."""
        return self.arguments.info

    def call(
        self,
        request: Request,
        *,
        fence: Fence | None = None,
        others: tuple[Dispatcher, ...] = (),
        until: float | None = None,
        ended: Outcome | None = None,
        in_turn: bool = False,
    ) -> int:
        """Make one call on the engine, or go on with one that has `ended`. Returns the engine's number, unsigned.

        The links repair broken connections (transport/reconnect.py). `until` is given if this call is part of another
        one, or has begun already: it blocks up to this time of time.monotonic(). `in_turn` says that the whole call
        has waited for earlier async calls.
        """
        call: _Call | None = None
        if ended is not None and (interrupt := take_interrupt()) is not None:
            accounts.account_interrupt(self, interrupt, request, ended, touched=False)
            raise interrupt
        try:
            until = time.monotonic() + self.session.timeout if until is None else until
            call = _Call(request, fence, others, until, ended, self.paths.handle)
            if fence is not None or not self.unversioned:
                self._check_change(call)
            if request.nbytes == 0:
                self.session.check_open()
                return 0
            waits = ended is None and not in_turn and self.unversioned
            if waits and not (self.turns.quiet.open and all(other.turns.quiet.open for other in others)):
                self.wait_turn(request, call.deadline, others)
            while True:
                if call.ended is None:
                    done = self._attempt(call)
                    if done is not None:
                        return done
                done = self._recover(call)
                if done is not None:
                    return done
        except Error as error:
            assert call is not None
            self._account_error(call, error)
            raise
        except BaseException as error:
            how, touched = (ended, False) if call is None else (call.done(), call.touched)
            accounts.account_interrupt(self, error, request, how, touched=touched)
            raise

    def _check_change(self, call: _Call) -> None:
        """Give a fenced call its lock's token. Raises InvalidArgumentError for a change that is not allowed."""
        request, fence = call.request, call.fence
        if not self.unversioned and request.opcode is not Opcode.READ and not request.token:
            raise InvalidArgumentError(
                f"{self.arguments.asked_by(request)}: a buffer with versions={self.info.versions} can only be changed "
                "by publish()"
            )
        if fence is not None:
            call.warden = self._check_fence(request, fence)
            # a call that has ended already keeps the token that the lock had when it was made
            if call.ended is None and not request.token:
                call.request = request._replace(token=fence.token)

    def _attempt(self, call: _Call) -> int | None:
        """Return the engine's number, or None if the attempt failed; `call.ended` says how."""
        self.session.check_open()
        request, others, deadline = call.request, call.others, call.deadline
        handle, theirs, warden = self.paths.handle, _NOBODY, None
        gated = request.token != 0 or request.opcode is Opcode.APPLY
        if call.warden is not None:  # in each attempt: one of the two buffers may have moved meanwhile
            check_warden(self.arguments.asked_by(request), self.info, call.warden.info)
        if handle is None or gated or others:
            handle, theirs = handles_of(self.paths, [other.paths for other in call.beside], deadline, gated=gated)
        if call.warden is not None:
            theirs, warden = theirs[:-1], theirs[-1]
        call.handle = handle
        if others and request.source == NOWHERE:
            sources = others if request.sources else others[:1]
            if any(self.paths.lies_apart(source.paths) for source in sources):
                return self._bring(call, [self.arguments.elements(request)])
        left_ms = deadline.left_ms()
        if self.paths.lost and self.paths.are_lost(request.offset, request.nbytes):
            left_ms = min(left_ms, LOST_WAIT_MS)  # servers that have lost the memory may never answer
        call.attempt = attempt = Attempt()
        done = handle.transfer(request, left_ms, theirs, attempt, warden)
        if (interrupt := take_interrupt()) is not None:
            accounts.account_interrupt(self, interrupt, request, done, touched=call.touched)
            raise interrupt
        if isinstance(done, int):
            if request.opcode is not Opcode.READ:  # a read leaves nothing to settle, and its array is the caller's
                here.finished = call.made
            return done
        call.ended = done
        return None

    def _recover(self, call: _Call) -> int | None:
        """Do what decide() says after a failed attempt. Returns the engine's number if the call is done after that,
        None if another attempt has to be made. Raises the call's error.
        """
        ended, heard = call.ended, None
        assert ended is not None
        if ended.status is Status.LOCK_LOST and call.fence is not None:
            call.fence.lose(call.request.token)
        while True:
            facts = self._facts(call, ended, heard)
            action = decide(ended, facts)
            if action in (Action.SETTLE, Action.RETRY, Action.FAIL) and needs_paths(ended, facts):
                self._forget(call)  # the next attempt, or the next call, looks for new paths
            match action:
                case Action.REFRESH:
                    heard = self._ask(call, ended)
                case Action.REOPEN:
                    if self._reopen(call, ended):
                        break
                    heard = Heard(answered=False)
                case Action.BRING:
                    return self._bring(call, self._left_of(call, ended))
                case Action.SETTLE:
                    whole = [self.arguments.elements(call.request)]
                    left = whole if call.request.opcode is Opcode.READ else self._left_of(call, ended)
                    if left != whole:
                        return self._do_rest(call, left)
                    call.ended = ended = replace(ended, sent=False)
                case Action.FAIL:
                    raise self._error(call, ended)
                case Action.RETRY:
                    call.pause()
                    break
        call.ended = None
        return None

    def _facts(self, call: _Call, ended: Outcome, heard: Heard | None) -> Facts:
        """Return the facts that recovery.decide() needs. Makes no request."""
        request, others = call.request, call.others
        given = bool(others) and not request.sources and request.source != NOWHERE
        read_only = self.paths.read_only(ended.segment)
        return Facts(
            in_time=call.deadline.left() > 0.0,
            alive=self.paths.alive(),
            heard=heard,
            repeatable=ended.status is not Status.DENIED or self._may_repeat(call, ended, read_only=read_only),
            read_only=read_only,
            reopened=call.reopened,
            movable=any(each.info.movable for each in (self, *call.beside)),
            sources=bool(others) and not given,
            has_state=given or call.warden is not None,
            known_lost=any(each.paths.lost for each in (self, *call.beside)),
        )

    def _may_repeat(self, call: _Call, refused: Outcome, *, read_only: bool) -> bool:
        """Return True if a call that was refused in part may be made once more with a newer token.

        That is so if no part of the call would be done twice. A reader's token allows reads only, so a newer one would
        not help it to write.
        """
        opcode = call.request.opcode
        if opcode is Opcode.READ:
            return True
        if read_only:
            return False
        if opcode in _REWRITES or not refused.sent:
            return True
        return outcome_of_change(self, refused, 0, _AGAIN_WAIT_MS if call.reopened else 0) == NOT_APPLIED

    def _ask(self, call: _Call, ended: Outcome) -> Heard:
        """Ask the coordinator where the buffers are now.

        Raises NotFoundError if a server answered that it does not have a segment, and the coordinator says that the
        buffer was deleted.
        """
        buffers = (self, *call.beside)
        if ended.status is Status.DENIED:
            answered = self.paths.refresh(call.deadline)
            return Heard(answered, answered and self.info.movable, self.paths.lost)
        if ended.status not in (Status.NOT_FOUND, Status.APART):
            lost = [each.paths.is_lost() for each in buffers]
            return Heard(answered=True, lost=any(lost))
        answered, moved = True, False
        for each in buffers:
            # Drop the paths: a mapping would keep the memory of a deleted buffer from being reused.
            each.paths.forget(call.handle if each is self else each.paths.handle)
            refreshed = each.paths.refresh(call.deadline)
            answered &= refreshed
            # The paths may date from before a move, while the description is already the new one.
            moved |= refreshed and each.info.movable and not each.paths.lost
        return Heard(answered, moved, any(each.paths.lost for each in buffers))

    def _reopen(self, call: _Call, refused: Outcome) -> bool:
        """Request newer tokens for another attempt. False if the coordinator does not answer."""
        if call.reopened:
            call.pause()
        call.reopened = True
        call.touched |= call.request.opcode in _REWRITES and refused.sent
        return all(buffer.paths.reopen(call.deadline) for buffer in (self, *call.beside))

    def _forget(self, call: _Call) -> None:
        self.paths.forget(call.handle)
        for other in call.beside:
            other.paths.forget(other.paths.handle)

    def _bring(self, call: _Call, parts: list[range]) -> int:
        """Do the unfinished `parts` of a call by reading its sources into this process and sending the values along."""
        request, others = call.request, call.others
        rest = () if request.sources else others[1:]
        do = functools.partial(self.call, fence=call.fence, others=rest, until=call.until)
        number = bring(self, request, others, parts, do, call.until)
        here.finished = call.made
        return number

    def _do_rest(self, call: _Call, left: list[range]) -> int:
        do = functools.partial(self.call, fence=call.fence, others=call.others, until=call.until, in_turn=True)
        number = do_rest(self, call.request, left, do)
        here.finished = call.made
        return number

    def _left_of(self, call: _Call, ended: Outcome) -> list[range]:
        """Return the elements that a failed call did not apply. Raises the call's error if that is not known."""
        request, unknown = call.request, ended.unknown
        try:
            parts = self.session.engine.resolve(unknown, call.deadline.left_ms()) if unknown is not None else []
        except EngineError as error:
            raise self._error(call, ended) from error
        known = (
            ended.bytes_applied + sum(nbytes for _, nbytes, _ in parts) >= request.nbytes or request.indices is not None
        )
        # A part that was applied although its answer was lost has not delivered its result.
        result = request.opcode in (Opcode.FETCH_ADD, Opcode.COMPARE_SWAP) or engine.address_of(request.sink)
        bad = (PartOutcome.UNKNOWN, PartOutcome.APPLIED) if result else (PartOutcome.UNKNOWN,)
        if not parts or not known or any(state in bad for _, _, state in parts):
            raise self._error(call, ended)
        missing = [(at, nbytes) for at, nbytes, state in parts if state is PartOutcome.NOT_APPLIED]
        return ranges_of(missing, self.arguments.itemsize)

    def later(
        self,
        request: Request,
        call: Callable[[], Any],
        *,
        result: Any,
        keeps: object,
        fence: Fence | None = None,
        window: Window | None = None,
        priority: int = 0,
    ) -> Future[Any]:
        """Return the future of an async read, write or addition, with the result `result`. The engine does it.

        If the engine cannot do it alone (no paths are known yet, or the buffer has several versions), a thread of the
        client runs `call`.
        """
        self.session.check_open()
        calls, elements = self.session.calls, self.arguments.elements(request)
        handle = self.paths.handle if fence is None else self.paths.gated_handle
        if fence is not None and handle is not None:
            if self._check_fence(request, fence) is None:
                request = request._replace(token=fence.token)
            else:
                handle = None  # a blocking call on a thread: the engine's async operations have no warden

        def go_on(ended: Outcome | None) -> Any:
            self.call(request, fence=fence, ended=ended)
            return result

        future = None
        if handle is not None and self.unversioned and request.nbytes > 0 and not self.paths.lost:
            timeout_ms = self.session.timeout_ms
            future = calls.transfer(
                request, handle, self.turns, go_on, timeout_ms, result=result, keeps=keeps, window=window,
                priority=priority,
            )  # fmt: skip
        if future is None:
            changes = request.opcode is not Opcode.READ
            future = calls.submit(
                call, self.turns, elements.start, elements.stop, changes=changes, window=window, priority=priority
            )
        return future

    def _check_fence(self, request: Request, fence: Fence) -> Dispatcher | None:
        """Return the buffer whose lock it is, if that is another one. Raises InvalidArgumentError for what is not a
        lock that can fence a change of this buffer.
        """
        owner = getattr(fence, "owner", None)
        if owner is self:
            return None
        asked = self.arguments.asked_by(request)
        if not isinstance(owner, Dispatcher):
            raise InvalidArgumentError(f"{asked}: fence= takes a lock that a buffer's lock() has made")
        if owner.session is not self.session:
            raise InvalidArgumentError(
                f"{asked}: the lock passed as fence= is held by another client of this process; nothing was done"
            )
        if owner.info.id == self.info.id:
            return None
        check_warden(asked, self.info, owner.info)
        return owner

    def wait_turn(self, request: Request, deadline: Deadline, others: tuple[Dispatcher, ...] = ()) -> None:
        """Wait for the client's earlier async calls on the same elements. Raises TimeoutError."""
        calls, asked, elements = self.session.calls, self.arguments.asked_by(request), self.arguments.elements(request)
        changes = request.opcode is not Opcode.READ
        try:
            calls.wait(self.turns, elements.start, elements.stop, asked, deadline.left(), changes=changes)
        except Error as error:
            error.smb_account = Failed(self, elements, None)
            raise
        changes = request.opcode is Opcode.APPLY
        for other in others:
            calls.wait(other.turns, 0, other.arguments.size, asked, deadline.left(), changes=changes)

    # ---- errors

    def _account_error(self, call: _Call, error: Error) -> None:
        """Store the account and the outcome of the call in an error that has none yet."""
        if error.smb_account is not None:
            return
        request, ended = call.request, call.ended
        if call.touched:
            error.outcome = UNKNOWN
        elif request.opcode is not Opcode.READ and ended is not None and ended.sent:
            error.outcome = outcome_of_change(self, ended, request.nbytes, _REFUSED_WAIT_MS)
        error.smb_account = Failed(self, self.arguments.elements(request), None if ended is None else ended.unknown)

    def _error(self, call: _Call, outcome: Outcome) -> Error:
        request, opcode = call.request, call.request.opcode
        segment = self.info.layout.segments[outcome.segment]
        where = f"memory server {segment.server} at {segment.address}"
        known = self._known_of(call, outcome)
        applied = (
            "reading can be repeated" if outcome.sent and opcode is Opcode.READ else
            "nothing was applied" if known == NOT_APPLIED else
            "all of it was applied" if known == APPLIED else
            f"outcome unknown: {outcome.bytes_applied} bytes are confirmed, the rest may or may not have been applied; "
            f"buffer.settle(error) finds out"
        )  # fmt: skip
        reader = opcode is not Opcode.READ and self.session.coordinator.tokens.read_only(segment.id)
        asked = self.arguments.asked_by(request)
        over = outcome.status is Status.SESSION_ENDED
        why = self.session.why_ended() if over else self.session.why_untrusted(segment.server)
        timeout = self.session.timeout
        infos = [each.info for each in (self, *call.beside)]
        lost = any(info.lost for info in infos)
        moved = any(info.movable for info in infos) and not lost
        if lost and (outcome.status in UNREACHED or outcome.status in WITHOUT_IT):
            outcome = replace(outcome, status=Status.NOT_FOUND)
        error = error_of(
            opcode, outcome, asked, where, applied, reader=reader, timeout=timeout, why=why, moved=moved,
            warden="" if call.warden is None else call.warden.info.name,
        )  # fmt: skip
        error.outcome = known
        error.smb_account = Failed(self, self.arguments.elements(request), None if call.touched else outcome.unknown)
        return error

    def _known_of(self, call: _Call, failed: Outcome) -> CallOutcome:
        if call.request.opcode is Opcode.READ or not failed.sent:
            known: CallOutcome = NOT_APPLIED
        else:
            # Each part is refused separately, and answers to the other parts may still arrive.
            patience_ms = _REFUSED_WAIT_MS if failed.status in (Status.DENIED, Status.OUT_OF_MEMORY) else 0
            known = outcome_of_change(self, failed, call.request.nbytes, patience_ms)
        return UNKNOWN if call.touched and known == NOT_APPLIED else known  # NOT_APPLIED was about this attempt alone


class TracedDispatcher(Dispatcher):
    """Makes a span of each call, in a program that is traced."""

    def call(self, request: Request, **how: Any) -> int:
        """See Dispatcher.call."""
        info = self.info
        about = {
            "smb.buffer": info.name,
            "smb.operation": request.opcode.name.lower(),
            "smb.bytes": request.nbytes,
            "smb.servers": sorted({segment.server for segment in info.layout.segments}),
            "smb.client": self.session.name,
        }
        with tracing.span(f"smb.buffer {about['smb.operation']}", about):
            return super().call(request, **how)


def dispatcher_of(session: Session, info: BufferInfo) -> Dispatcher:
    """Return what makes the calls of a buffer."""
    return TracedDispatcher(session, info) if tracing.on() else Dispatcher(session, info)


def _go_on(calls: weakref.ref[Dispatcher], started: float, request_address: int, outcome_address: int) -> Any:
    """Go on with a direct method's call that failed, and return the engine's word as an element. The addresses are
    those of the engine's structs; the caller holds the buffer.
    """
    request, ended = engine.direct_call(request_address, outcome_address)
    dispatcher = calls()
    assert dispatcher is not None
    until = started + dispatcher.session.timeout
    return dispatcher.arguments.number(dispatcher.call(request, until=until, ended=ended))

"""Child processes with limits of time and memory, for input that may take any amount of both.

A chat template, a regular expression or a compressed table decides itself how long it takes and how much it allocates.
A thread cannot be stopped and a process cannot give its memory back, so such input is handled by a child process: an
own interpreter, started without `fork`, which is safe beside threads and CUDA. It imports only what its work needs.

The kernel enforces the limits, also within C code. The time is the child's processor time: a busy machine or a stopped
process does not use it up. A child ends when its input is closed, so when its parent ends, or after IDLE seconds.
"""

import atexit
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from mmap import mmap
from struct import Struct
from typing import Any, BinaryIO, Self, TypeVar

from rptrain.utils.errors import UserError, describe
from rptrain.utils.units import format_bytes

T = TypeVar("T")
SECONDS = 5.0  # processor time of one item
MEMORY = 1 << 30  # bytes
IDLE, GRACE = 30.0, 5.0  # seconds without work, and until a process that closed its output has ended
BUFFERED = 1 << 22  # bytes of answers that a child keeps, so that it works on while its parent does something else
COUNT = Struct("Q")  # how the items that are done are counted, in memory that a child shares with its parent
COMMAND = (sys.executable, "-P", "-m", "rptrain.utils.limited")  # without the current directory on the path
# One thread for each library, and no allocators of their own: they reserve address space, which the limit counts.
ALONE = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_idle: list["_Child"] = []  # children without work, which take the next
os.register_at_fork(after_in_child=_idle.clear)  # they belong to the parent


class Limited(UserError):
    """A limit was exceeded. The message is a predicate without its subject, such as "takes more than 10 s".

    `done` counts the items before the one that exceeded it. Some of them may not have arrived.
    """

    def __init__(self, message: str, done: int):
        super().__init__(message)
        self.done = done


def stream(
    function: Callable[..., Iterable[T]],
    *given: Any,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    setup: Callable[[], object] | None = None,
) -> Iterator[T]:
    """The items of `function(*given)`, which a child process computes from now on.

    The function must be importable, and its arguments and items picklable. Every item may take `seconds` of processor
    time, and all of them at once `memory` bytes. `setup` is called first, without a limit of time: it imports what the
    function needs. The iterator raises what the function raises, and Limited.
    """
    return _begun((function, given, seconds, memory, setup), _Working())


def call(function: Callable[..., T], *given: Any, seconds: float = SECONDS, memory: int = MEMORY) -> T:
    """The result of `function(*given)`; see `stream`."""
    (result,) = stream(_once, function, given, seconds=seconds, memory=memory)
    return result


class Pool:
    """Child processes that work at once. Closing it ends those that still work.

    `submit` returns the items of a function as a list that is ready later; its `result` raises as `stream` does.
    """

    def __init__(self, processes: int):
        self._threads = ThreadPoolExecutor(processes, "limited")
        self._working = _Working()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._working.closed = True
        for child in self._working.copy():
            child.end()
        self._threads.shutdown(cancel_futures=True)

    def submit(
        self,
        function: Callable[..., Iterable[T]],
        *given: Any,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        setup: Callable[[], object] | None = None,
    ) -> "Future[list[T]]":
        return self._threads.submit(self._items, (function, given, seconds, memory, setup))

    def _items(self, request: "_Request") -> list[Any]:
        return [] if self._working.closed else list(_begun(request, self._working))


class _Working(set["_Child"]):
    """Children that work. Once `closed`, whoever adds a child ends it."""

    closed = False


_Request = tuple[Callable[..., Any], tuple[Any, ...], float, int, Callable[[], object] | None]


def _begun(asked: _Request, working: _Working) -> Iterator[Any]:
    """The items of a function, which a child computes from now on. It is in `working` while it does."""
    _, _, seconds, memory, _ = asked
    items = _items(pickle.dumps(asked, pickle.HIGHEST_PROTOCOL), seconds, memory, working)
    next(items)  # asks the child, which from now on is ended if the iterator is closed or collected as garbage
    return items


def _once(function: Callable[..., T], given: tuple[Any, ...]) -> Iterator[T]:
    yield function(*given)


def _items(request: bytes, seconds: float, memory: int, working: _Working) -> Iterator[Any]:
    """Yields None once the request is sent, and then the items: none if `working` is closed by then."""
    too_large = f"needs more than {format_bytes(memory)} of memory"
    child = _ask(request, working)
    try:
        yield None
        while working.closed or not child.begins():
            working.discard(child)
            child.kill()
            if working.closed:
                return
            child = _ask(request, working)
        while (answer := child.receive())[0] == "item":
            yield answer[1]
    except EOFError:
        ended = child.status()
        if ended == -signal.SIGPROF:
            raise Limited(f"takes more than {seconds:g} s", child.done) from None
        if ended == -signal.SIGKILL:
            raise Limited("was killed, probably because the machine ran out of memory", child.done) from None
        if ended == -signal.SIGABRT:  # as C++ and Rust end where memory is not to be had
            raise Limited(too_large, child.done) from None
        raise Limited(f"ends the process that handles it (status {ended})", child.done) from None
    except BaseException:  # GeneratorExit: nobody wants the rest
        child.kill()
        raise
    finally:
        working.discard(child)
    if answer[0] == "memory":
        child.kill()
        raise Limited(too_large, child.done)
    _idle.append(child)
    if answer[0] == "error":
        raise answer[1]


def _ask(request: bytes, working: _Working) -> "_Child":
    """Sends a request to a child without work, or to a new one."""
    try:
        child = _idle.pop()
    except IndexError:
        child = _Child()
    working.add(child)
    child.send(request)
    return child


class _Child:
    """A process that serves requests, one at a time."""

    def __init__(self) -> None:
        self._begun = False
        counter = os.memfd_create("items done")
        os.truncate(counter, COUNT.size)
        self._counter = mmap(counter, COUNT.size)
        try:
            self._process = subprocess.Popen(
                (*COMMAND, str(counter)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | ALONE,
                pass_fds=(counter,),
                process_group=0,  # Ctrl-C in a terminal is for the parent, also before `main` ignores it
            )
        except OSError as error:  # of the system: too many processes, or too little memory
            raise UserError(
                f"{sys.executable}: a child process cannot be started: {error.strerror or error}"
            ) from error
        finally:
            os.close(counter)

    @property
    def done(self) -> int:
        """The items of the last request that are done, also those that have not been sent."""
        return COUNT.unpack_from(self._counter)[0]

    def send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended while it had no work: see `begins`
            self._process.stdin.write(request)
            self._process.stdin.flush()

    def begins(self) -> bool:
        """Whether the process has received the request; False if it had ended before."""
        try:
            self.receive()
        except (EOFError, ConnectionError):
            if self._begun:
                return False
            raise RuntimeError(f"{COMMAND[-1]} cannot be started: it exits with status {self.status()}") from None
        self._begun = True
        return True

    def receive(self) -> tuple[str, Any]:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)

    def status(self) -> int:
        """The exit status of a process that has closed its output."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        return self.kill()

    def end(self) -> None:
        """Ends the process; whoever reads its answers finds their end."""
        self._process.kill()

    def kill(self) -> int:
        """Ends the process, unless it has ended, and returns its exit status."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of a request that was not sent
                pipe.close()
        return self._process.wait()


@atexit.register
def end_idle() -> None:
    """Ends the children that have no work."""
    while _idle:
        _idle.pop().kill()


def serve(asked: BinaryIO, answers: BinaryIO, counter: mmap) -> None:
    """Answers requests until the end of the input, or until there is none for IDLE seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    while select.select([asked], [], [], IDLE)[0]:
        try:
            answers.write(pickle.dumps(("begun", None)))
            answers.flush()
            function, given, seconds, memory, setup = pickle.load(asked)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 (of an import; the parent raises it)
            answers.write(_last("error", error))
            answers.flush()
            continue
        limit = _address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
        buffer = bytearray()
        for answer in _limited(function, given, seconds, counter, setup):
            if len(buffer) + len(answer) < BUFFERED:
                buffer += answer
                continue
            answers.write(buffer)
            buffer.clear()
            answers.write(answer)
            answers.flush()
        answers.write(buffer)
        answers.flush()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _limited(
    function: Callable[..., Iterable[Any]],
    given: tuple[Any, ...],
    seconds: float,
    counter: mmap,
    setup: Callable[[], object] | None,
) -> Iterator[bytes]:
    """The answers to a request. SIGPROF, for which there is no handler, ends the process after `seconds`."""
    done = 0
    COUNT.pack_into(counter, 0, done)
    try:
        if setup is not None:
            setup()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for item in function(*given):
            answer = pickle.dumps(("item", item), pickle.HIGHEST_PROTOCOL)
            signal.setitimer(signal.ITIMER_PROF, 0)
            yield answer
            del item, answer
            done += 1
            COUNT.pack_into(counter, 0, done)
            signal.setitimer(signal.ITIMER_PROF, seconds)
        last = _last("end")
    except MemoryError:
        last = _last("memory")
    except Exception as error:  # noqa: BLE001 (the parent raises it)
        last = _last("error", error)
    signal.setitimer(signal.ITIMER_PROF, 0)
    yield last


def _last(kind: str, error: Exception | None = None) -> bytes:
    try:
        answer = pickle.dumps((kind, error))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001 (exceptions may be pickled in a way that cannot be read)
        assert error is not None
        return pickle.dumps((kind, RuntimeError(describe(error, with_type=True))))
    return answer


def _address_space() -> int:
    """The bytes that RLIMIT_AS counts."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main() -> None:
    """Serves requests. Output of libraries is discarded, because it would mix with the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # to a whole group of processes: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        serve(sys.stdin.buffer, answers, mmap(int(sys.argv[1]), COUNT.size))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()

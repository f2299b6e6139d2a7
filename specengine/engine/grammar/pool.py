"""Compiling untrusted grammars: few at a time, and first where it can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue

from specengine.core.errors import QueueFullError, RequestError
from specengine.core.grammar import GrammarSpec
from specengine.core.limits import LimitConfig
from specengine.engine.grammar.compiler import GrammarCompiler, refusal
from specengine.engine.grammar.state import LlguidanceState


class GrammarPool:
    """A grammar that is new is tried in a process of its own, which ends when it takes too long or
    no prompt waits for it. What has passed there is compiled here, in one of as many threads:
    it is known to end, and llguidance lets other threads run meanwhile. Prompts that ask for the
    same grammar wait for one trial."""

    def __init__(self, compiler: GrammarCompiler, limits: LimitConfig) -> None:
        self._compiler = compiler
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.grammar_workers, "grammar")
        seconds = limits.grammar_timeout
        self._trials = [TrialProcess(compiler, seconds) for _ in range(limits.grammar_workers)]
        self._idle: SimpleQueue[TrialProcess] = SimpleQueue()
        for trial in self._trials:
            self._idle.put(trial)
        self._lock = threading.Lock()  # of what follows, and of compilations
        self._open: dict[GrammarSpec, Compilation] = {}

    def submit(self, spec: GrammarSpec) -> GrammarJob:
        """Begin to compile a grammar. Safe to call from any thread.

        Raises RequestError where no grammar can be served, and QueueFullError where too many wait.
        """
        job = GrammarJob(spec, self._leave)
        if (compiled := self._compiler.compiled(spec)) is not None:
            job.future.set_result(compiled)
            return job
        self._compiler.check(spec)
        with self._lock:
            shared = self._open.get(spec)
            if shared is None:
                most = self._limits.grammar_workers + self._limits.max_queued_grammars
                if len(self._open) >= most:
                    raise QueueFullError("too many grammars wait to be compiled; retry later")
                shared = Compilation(spec)
                self._threads.submit(self._run, shared)  # raises where no thread can be started
                self._open[spec] = shared
            shared.jobs.append(job)
        return job

    def close(self) -> None:
        """End every process. Nothing may be started afterwards."""
        for trial in self._trials:
            trial.close()
        self._threads.shutdown(cancel_futures=True)
        for trial in self._trials:
            trial.reap()

    def _leave(self, job: GrammarJob) -> None:
        """A job has been cancelled: its compilation ends with the last."""
        with self._lock:
            shared = self._open.get(job.spec)
            if shared is None or job not in shared.jobs:
                return
            shared.jobs.remove(job)
            if shared.jobs:
                return
            del self._open[job.spec]
            if shared.trial is not None:
                shared.trial.kill()

    def _run(self, shared: Compilation) -> None:
        state, reason, failure = None, None, None
        try:
            with self._trial_of(shared) as trial:
                if trial is None:
                    return
                reason, num_bytes = trial.attempt(shared.spec)
            if reason is None:
                state = self._compiler.start(shared.spec, num_bytes)
        except Exception as error:
            failure = error
        with self._lock:
            jobs = shared.jobs
            if jobs:
                del self._open[shared.spec]
        for job in jobs:
            if not job.future.set_running_or_notify_cancel():
                continue
            if state is not None:
                job.future.set_result(state.fork())
            else:
                job.future.set_exception(failure or refusal(job.spec, reason or ""))

    @contextmanager
    def _trial_of(self, shared: Compilation) -> Iterator[TrialProcess | None]:
        """An idle process, which may be killed within; None where no job waits."""
        trial = self._idle.get()
        try:
            with self._lock:
                shared.trial = trial if shared.jobs else None
            yield shared.trial
        finally:
            with self._lock:
                shared.trial = None
            trial.settle()
            self._idle.put(trial)


@dataclass(eq=False)
class Compilation:
    """A grammar that waits or is being compiled. trial: while it runs. Once its last job has left,
    it is no longer open, and nothing comes of it."""

    spec: GrammarSpec
    jobs: list[GrammarJob] = field(default_factory=list)
    trial: TrialProcess | None = None


class GrammarJob:
    """A prompt waits for its grammar. future: a state at its beginning, or RequestError where it
    does not compile within the limits. It may be cancelled from any thread at any time."""

    def __init__(self, spec: GrammarSpec, leave: Callable[[GrammarJob], None]) -> None:
        self.spec = spec
        self.future: Future[LlguidanceState] = Future()
        self._leave = leave

    def cancel(self) -> None:
        """The last of those that wait for a grammar kills its trial."""
        self.future.cancel()
        self._leave(self)


class TrialProcess:
    """trial.py, started when it is needed, and again when it has ended."""

    def __init__(self, compiler: GrammarCompiler, seconds: float) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._is_killed = False  # what runs, or is about to

    def attempt(self, spec: GrammarSpec) -> tuple[str | None, int]:
        """Why the grammar does not pass, None where it does, and the bytes that it holds. Raises
        RequestError where it was killed before it began."""
        if self._is_killed:
            raise RequestError(f"{spec.param} was not compiled: no request waits for it any more")
        is_running = self._process is not None and self._process.poll() is None
        process = self._process if self._process is not None and is_running else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not is_running:
                process.stdin.write(json.dumps(self._compiler.vocabulary()) + "\n")
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            reason, num_bytes = json.loads(answer)
            return reason, num_bytes
        self.reap()
        return f"it takes more than {self._seconds:g} s, or too much memory; simplify it", 0

    def kill(self) -> None:
        """End the attempt that runs, or that is about to."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def settle(self) -> None:
        """Between two attempts. A process that was killed may look alive for a moment, and the next
        grammar must not meet it."""
        if self._is_killed:
            self.reap()
            self._is_killed = False

    def close(self) -> None:
        """Whatever runs ends, and nothing starts any more."""
        self._is_closed = True
        self.kill()

    def reap(self) -> None:
        """End the process, if there is one, and close its pipes."""
        if self._process is not None:
            with suppress(BrokenPipeError), self._process as process:
                process.kill()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise RequestError("the server is shutting down")
        self.reap()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specengine.engine.grammar.trial", str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a Ctrl-C at the terminal is for the server
        )
        return self._process
